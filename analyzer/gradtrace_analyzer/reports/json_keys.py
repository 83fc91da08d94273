"""Every key of the answers that `--format json` gives: its type and meaning, declared once.

Data alone: the reports that make the answers do not read it. The reference page is made from it (`scripts/reference`),
and `tests/analyzer/test_json_keys.py` holds answers and declarations against each other, both ways. How a declaration
is written stands in `json_types`.
"""

# fmt: off
# A declaration is read as a table: one line a key, and what a key holds indented under it.

from __future__ import annotations

from gradtrace_analyzer.reports.json_types import (
    ANYTHING,
    INTEGER,
    TEXT,
    Keys,
    ListOf,
    MapOf,
    OrNull,
    keys_of,
    sides,
)

_PLACE: Keys = {
    "root": "integer?: Number of the root module, by first call.",
    "module_fqn": "text?: Module, empty for the root itself.",
    "node_name": "text?: Autograd Node.",
    "parameter_fqn": "text?: Parameter.",
    "bucket_index": "integer?: Bucket of the pass.",
    "stage_index": "integer?: Pipeline stage.",
    "microbatch": "integer?: Microbatch of the step.",
}

_REACHED = keys_of({
    "rank": "integer: Rank that inherits.",
    "step": "integer: Step of its first row that does.",
    "link": "text: Link of that row.",
    **_PLACE,
})

_RESCALED = keys_of({
    "parameter_fqn": "text: Parameter whose gradient was changed outside backward.",
    "after_backward_index": "integer: Pass after which it was as it should be.",
    "backward_index": "integer: Pass that found it changed.",
    "microbatch": "integer?: Microbatch of that pass.",
    "side": "text?: `baseline` or `candidate`: who changed it; null where no number of one side explains it.",
    "times": "number?: What that side multiplied it by.",
    "others": "integer: Further parameters of which the pass shows it.",
})

_REPLAY = keys_of({
    "side": "text: `baseline` or `candidate`.",
    "equal": "boolean?: Whether the very run that the origin names gave the same bits; null: it was not repeated.",
    "error": "number?: Relative error between its two runs.",
    "run_count": "integer: How often the Node was run again on the origin's ranks, over all steps.",
    "apart_count": "integer: How often that gave other bits.",
})

ORIGIN = keys_of({
    "step": "integer: Step, from 0.",
    "rank": "integer: The first of `ranks`.",
    "ranks": "[integer]: Ranks on which this is the same place.",
    "link": "text: Link of the chain.",
    **_PLACE,
    "backward_index": "integer?: Backward pass of the step.",
    "call_index": "integer?: Call of the module in that microbatch and phase.",
    "name": "text?: Input, or argument that was noted.",
    "event_index": "integer?: Order of the Node within its pass.",
    "phase": "text?: Phase of the module's call, or half of the stage's pass.",
    "only_in": "text?: `baseline` or `candidate`, where one side alone has the row.",
    "positions": "[integer]?: Positions of the Node's gradients that differ, where not all do.",
    "rescaled": (OrNull(_RESCALED), "A gradient that was changed between two passes, where that is the cause."),
    "replays": (OrNull(ListOf(_REPLAY)), "What running the Node a second time showed (`GRADTRACE_REPLAY`)."),
    "root_name": "text?: Name of the root module, where there are several.",
    "rewritten": "text?: Parameter of the module that other code than the optimizer changed within the step.",
    "shares_input": "boolean: Whether another origin's module was called with the same tensor.",
    "repeat_count": "integer: How often the same place shows it again, in other passes.",
    "reached": (ListOf(_REACHED), "Where each other rank first inherits from it."),
    "inherits": (MapOf("link", keys_of({
        "alone": "integer: Rows that can have it from this origin alone.",
        "shared": "integer: Rows that can have it from another origin too.",
    })), "Rows of the step that can have inherited from it."),
    "relative_error": "number?: Size of the difference: of the factor from 1, else estimated from sketches.",
    "tolerance": "number?: Largest relative error that rounding explains.",
    "factor": "number?: The candidate is this multiple of the baseline.",
    "baseline": (OrNull(MapOf("column", ANYTHING)), "The baseline's numbers."),
    "candidate": (OrNull(MapOf("column", ANYTHING)), "The candidate's numbers."),
}, name="origin")

_FAILURE = keys_of({
    "side": "text: `baseline` or `candidate`: the side that raised.",
    "step": "integer: Step.",
    "rank": "integer: Rank.",
    "microbatch": "integer: Microbatch.",
    "backward_index": "integer: Outermost backward pass that ended so.",
    "event_index": "integer?: Order of the Node within the pass.",
    "node_name": "text?: Node that was running.",
    "root": "integer?: Its root module.",
    "module_fqn": "text?: Its module.",
    "parameter_fqn": "text?: Parameter that it accumulates.",
    "exception_type": "text: Class of the exception.",
    "exception_text": "text: Its text.",
    "delivered": "[text]: Parameters that had their gradient by then.",
    "never_reached": "[text]: Parameters that had none.",
    "unused": "[text]: Of these, the modules that the step did not call.",
})

_STRUCTURE = keys_of({
    "kind": "text: `module`, `parameter`, `node`, `call`, `pass`, `input`, `gradient`, `bucket`, `group` or `rank`.",
    "name": "text: Its name.",
    "only_in": "text: `baseline` or `candidate`.",
    "module_fqn": "text?: Module in which it lies.",
    "module_class": "text?: Class of the module.",
    "phase": "text?: Phase of a module's call.",
    "count": "integer?: How many rows there are of it.",
    "holds": (OrNull(MapOf("kind", INTEGER)), "What lies inside, by kind."),
    "ranks": "[integer]: Ranks.",
    "first_step": "integer?: First step that has it.",
    "last_step": "integer?: Last step that has it.",
    "is_code": "boolean: Whether it shows that the code is another.",
    "is_compiled": "boolean: Whether it is there because code was compiled.",
})

_CHAIN_ROW = keys_of({
    "rank": "integer: Rank.",
    "link": "text: Link of the chain.",
    "key": (MapOf("column", ANYTHING), "The row's key."),
    "way": "text: `receives`, `returns`, `arrives`, `leaves` and so on; empty where there is one tensor.",
    "baseline": "number?: The baseline's norm.",
    "candidate": "number?: The candidate's norm.",
    "error": "number?: Relative error; 0: equal bit for bit.",
    "tolerance": "number?: Largest that rounding explains.",
    "is_origin": "boolean: Whether it is the origin itself.",
    "only_in": "text?: `baseline` or `candidate`, where one side alone has it.",
})

_DIVISION = keys_of({
    "ranks": "integer: Ranks that train the same parameters.",
    "passes": "integer: Accumulating backward passes in a rank's step.",
    "parameter_numel": "integer: Elements of the parameters that a rank holds.",
    "input_numel": "integer: Elements of a step's inputs, over all ranks and passes.",
    "input_count": "integer: Tensors of a step's inputs.",
})

_CRASH = keys_of({
    "rank": "integer: Its rank.",
    "step": "integer?: Last step that it recorded anything of.",
    "ended": "text: What stopped it, to follow `rank 0`.",
})

_CHANGE_KEYS: Keys = {
    "what": (
        "text: `step`, `between` (from a step's end to the next one's beginning), `forward`, `backward`, "
        "`optimizer`, `stage`, `transfer`, `receive`, `module` (without the modules that it calls), "
        "`node`, `bucket_transport` or `bucket_wait`."
    ),
    "rank": "integer?: Rank that changed most.",
    "stage_index": "integer?: Pipeline stage.",
    "kind": "text?: The stage's action, or what it receives.",
    "other_stage": "integer?: Stage that sends.",
    "root": "integer?: Root module.",
    "module_fqn": "text?: Module.",
    "name": "text?: Node or class; of a bucket its first parameter.",
    "ranks": "[integer]: Ranks that changed so.",
    "baseline_ns": "integer: Median over the baseline's steps.",
    "candidate_ns": "integer: Median over the candidate's steps.",
    "difference_ns": "integer: The candidate's less the baseline's.",
    "spread_ns": "integer: The larger of the two runs' own spreads.",
    "per_step": "number: How often such a time counts in a step.",
    "baseline_count": "integer: Steps of the baseline.",
    "candidate_count": "integer: Steps of the candidate.",
    "verdict": "text: `slower`, `faster`, `same` or `no_verdict`.",
}

_CHANGE = keys_of(_CHANGE_KEYS, name="change of a time")

_CAUSE = keys_of({
    **_CHANGE_KEYS,
    "inside": (OrNull(_CHANGE), "Node or module inside that explains at least half of it."),
}, name="cause")

_TIMES = keys_of({
    "verdict": "text: `slower`, `faster`, `same` or `no_verdict`; the command's exit status is not about it.",
    "explanation": "text: The answer in words.",
    "steps": (sides(ListOf(INTEGER)), "Steps that were used."),
    "left_out": (sides(INTEGER), "The first step, which is left out; null where it is not."),
    "slower": (ListOf(_CAUSE), "What got slower, no one of them inside another."),
    "faster": (ListOf(_CAUSE), "What got faster."),
    "common_ratio": "number?: Nearly every place changed by about this factor.",
    "unpaired_place_count": "integer: Places that one run alone has.",
    "rows": (ListOf(_CHANGE), "All places, the largest difference in a step first."),
})

DIFF = keys_of({
    "verdict": "text: `identical`, `within_tolerance`, `different` or `incomparable`.",
    "configuration": (ListOf(keys_of({
        "name": "text: What is configured otherwise.",
        "baseline": "anything?: The baseline's value.",
        "candidate": "anything?: The candidate's value.",
        "changes_numbers": "boolean: Whether it is known to change numbers.",
    })), "What the two runs are configured otherwise in."),
    "first_divergence": (OrNull(ORIGIN), "The first of `origins`, where the verdict is `different`."),
    "origins": (ListOf(ORIGIN), "Where the runs part: all that is read agrees, what comes out does not."),
    "inherited": (ListOf(ORIGIN), "First places of other links and ranks, which follow from an origin."),
    "spread": (ListOf(keys_of({
        "link": "text: Link of the chain.",
        "rank": "integer: Rank.",
        "stage_index": (INTEGER, "Stage.", "where stages were compared"),
        "first_step": "integer: First step in which it differs.",
        "row_count": "integer: Rows that differ.",
        "largest_error": "number?: Largest relative error of them.",
        "unmeasured_count": "integer: Rows that differ without a number for it.",
        "beyond_tolerance": "boolean: Whether any is more than rounding.",
        "place": "text?: Where the largest is.",
    })), "Which links differ, rank by rank."),
    "structure": (ListOf(_STRUCTURE), "What one side alone has."),
    "renames": "[text]: Renames under which names were compared, as `OLD=NEW`.",
    "likely_renames": "[text]: Renames that names and shapes suggest, and that were not applied.",
    "failures": (ListOf(_FAILURE), "Backward passes that ended with an exception on one side alone."),
    "first_nonfinite": (OrNull(ORIGIN), "Where the first value came from that is finite on one side alone."),
    "repeated": (ListOf(keys_of({
        "side": "text: Side that ran the Node again.",
        "step": "integer: Step.",
        "rank": "integer: Rank.",
        "before": "integer: Pass in which it ran first.",
        "backward_index": "integer: Pass in which it ran again, which the other side lacks.",
        "root": "integer?: Root module.",
        "module_fqn": "text?: Module.",
        "node_name": "text: Node.",
        "call_index": "integer?: Call of the module.",
        "times": "number: What arrived is this multiple of what arrived before.",
        "equal_count": "integer: Other Nodes of the pass that received the same again.",
    })), "Nodes that ran again with a multiple of what arrived before."),
    "equal": (MapOf("`ranks`, `links` or `modules`", ListOf(TEXT)), "What stayed equal in the origin's step."),
    "chain": (OrNull(ListOf(_CHAIN_ROW)), "With `-v`: the rows around the first origin."),
    "cover": (keys_of({
        "ranks": "[integer]: Ranks that were compared; of pipelines, the candidate's.",
        "stages": "[integer]?: Stages, where they were compared instead of ranks.",
        "steps": "[integer]: Steps that were compared.",
        "steps_by_rank": (MapOf("rank", ListOf(INTEGER)), "The same by rank."),
        "rows": (MapOf("table", INTEGER), "Rows that were compared."),
        "missing_ranks": (sides(ListOf(INTEGER)), "Ranks that a side lacks."),
        "step_alignment": (keys_of({
            "offset": "integer: What was added to the candidate's steps.",
            "framework": "text?: Whose counter said so.",
        }), "How the candidate's steps were numbered.", "with `--align-steps`"),
        "missing_steps": (sides(MapOf("rank", ListOf(INTEGER))), "Steps that a side lacks."),
        "problems": (sides(ListOf(TEXT)), "What the recorder gave up."),
        "incomplete_ranks": (sides(ListOf(INTEGER)), "Ranks whose recording was not closed."),
        "dropped": (sides(MapOf("table", INTEGER)), "Rows that had no room."),
        "unsummarised": (sides(MapOf("reason", INTEGER)), "Tensors without a summary."),
        "unread": (sides(ListOf(keys_of({
            "table": "text: Its table.",
            "rank": "integer: Its rank.",
        }))), "Parts that are damaged."),
        "asked_for": "text?: What `--at`, `--rank`, `--module` and `--link` left to look at.",
        "flights": (sides(ListOf(INTEGER)), "Steps that a flight recording holds."),
        "filters": (sides(MapOf("setting", ANYTHING)), "Settings that left something out."),
        "crashes": (sides(ListOf(_CRASH)), "Ranks that were stopped before their end."),
        "without_values": "[text]: Tables of which a side holds rows without values: these paired by name alone.",
    }), "What was compared, and what was not."),
    "factor": "number?: The first origin's factor.",
    "factor_causes": "[text]: Counts that would make that factor.",
    "tolerance": (keys_of({
        "unit": "number?: Unit roundoff of the coarsest arithmetic.",
        "arithmetic": "text?: That arithmetic, in words.",
        "summands": "integer?: Length of the longest sum.",
        "layers": "integer?: Depth in modules.",
        "measured_from": "[text]?: Repeats of the baseline that were measured (`--noise`).",
        "noise": "number?: Median relative error of the repeats.",
    }), "Where the tolerances come from."),
    "set_aside": (ListOf(keys_of({
        "kind": "text: What it is.",
        "name": "text: Its name.",
        "only_in": "text: `baseline` or `candidate`.",
        "count": "integer: How many rows.",
        "first_step": "integer: First step that has it.",
    })), "What was left out because it changes nothing."),
    "loss_scales": (ListOf(keys_of({
        "factor": "number: What the candidate's loss and gradients are multiplied by until they are unscaled.",
        "first_step": "integer: First step with that scale.",
        "step_count": "integer: Steps with it.",
    })), "Loss scales that were divided out."),
    "divided": (OrNull(keys_of({
        "baseline": (_DIVISION, "How the baseline divides its work."),
        "candidate": (_DIVISION, "How the candidate does."),
        "compared": (MapOf("link", INTEGER), "Sums that were compared."),
        "largest_error": "number: Largest relative error of a sum.",
        "factor": "number: Factor by which all sums differ, divided out.",
    })), "Where the work is divided otherwise: what was compared as sums over the parts."),
    "explanation": "text: The answer in words.",
    "failing": (MapOf("link", TEXT), "What fails, in words.", "with `--fail-on`"),
    "timing": (_TIMES, "What got slower or faster.", "with `--timing`"),
})

CHECK = keys_of({
    "verdict": "text: `clean`, `violated` or `incomparable`.",
    "violations": (ListOf(keys_of({
        "law": "text: Name of the law.",
        "severity": "text: `error` or `warning`.",
        "step": "integer: Step of its first place.",
        "rank": "integer?: Rank, where it is one rank's.",
        "group": "text?: Process group.",
        "microbatch": "integer?: Microbatch.",
        "backward_index": "integer?: Backward pass.",
        "bucket_index": "integer?: Bucket.",
        "root": "integer?: Root module.",
        "module_fqn": "text?: Module.",
        "node_name": "text?: Node.",
        "parameter_fqn": "text?: Parameter.",
        "hook_name": "text?: Communication hook.",
        "factor": "number?: Multiple of what it should be.",
        "relative_error": "number?: Size of the deviation.",
        "tolerance": "number?: What was allowed.",
        "event_index": "integer?: Order of the Node within its pass.",
        "stage_index": "integer?: Pipeline stage.",
        "phase": "text?: Half of the stage's pass.",
        "count": "integer?: How many like it there are, this one included.",
        "explanation": "text: The violation in words.",
        "ranks": "[integer]: Ranks that it is about.",
        "inherits": "text?: Law that broke before it in the step, and explains it.",
    })), "Broken laws, each at its first place, in causal order."),
    "compression": (ListOf(keys_of({
        "hook_name": "text: Hook that compresses.",
        "group": "text: Process group.",
        "bucket_count": "integer: Buckets that were measured.",
        "median_error": "number: Median relative error of a bucket.",
        "largest_error": "number: Largest.",
        "promised": "number?: Largest that the hook promises; null: nothing.",
    })), "What compressing hooks lose."),
    "judged": (MapOf("law", INTEGER), "How much each law compared."),
    "not_judged": (MapOf("law", TEXT), "Why the others could not be judged."),
    "cover": (keys_of({
        "ranks": "[integer]: Ranks that were judged.",
        "steps": (MapOf("rank", ListOf(INTEGER)), "Their steps."),
        "groups": (ListOf(keys_of({
            "group": "text?: Process group.",
            "ranks": "[integer]: Its ranks.",
            "recorded": "[integer]: Those that were recorded.",
            "root": "integer?: Root module whose gradients it reduces.",
            "module_fqn": "text?: Module whose gradients it reduces.",
            "unobserved": "text?: Why its reductions were not recorded.",
        })), "Groups that reduce gradients."),
        "missing_ranks": "[integer]: Ranks that recorded nothing.",
        "incomplete_ranks": "[integer]: Ranks whose recording was not closed.",
        "dropped": (MapOf("table", INTEGER), "Rows that had no room."),
        "unsummarised": (MapOf("reason", INTEGER), "Tensors without a summary."),
        "replay_skipped": (MapOf("reason", INTEGER), "Nodes that were chosen for a replay and not run again."),
        "flight_steps": "integer?: Steps that a flight recording keeps.",
        "settings": (MapOf("setting", ANYTHING), "Settings of the recording."),
        "problems": "[text]: What the recorder gave up.",
        "damaged": "[text]: Parts that could not be read.",
        "crashes": (ListOf(_CRASH), "Ranks that were stopped before their end."),
        "notes": "[text]: What limits the answer.",
    }), "What was judged, and what was not."),
    "explanation": "text: The answer in words.",
})

_THREAD_KEYS: Keys = {
    "thread": "integer: Thread, as the process numbers it.",
    "doing": (
        "text: `node`, `module`, `backward` (in no Node), `optimizer`, or outside of all these "
        "`after_module`, `after_backward`, `after_optimizer`."
    ),
    "since_ns": "integer: Since when.",
    "step": "integer?: Step.",
    "microbatch": "integer?: Microbatch.",
    "backward_index": "integer?: Backward pass.",
    "root": "integer?: Root module.",
    "module_fqn": "text?: Module.",
    "call_index": "integer?: Call of the module.",
    "node_name": "text?: Node.",
    "parameter_fqn": "text?: Parameter that the Node accumulates.",
    "event_index": "integer?: Order of the Node within its pass.",
    "autograd_seq": "integer?: Autograd's sequence number of the Node.",
    "phase": "text?: Phase of the module's call, or of the Node.",
    "optimizer": "text?: Class of the optimizer.",
    "module_inside": "text?: Module whose forward the Node runs again.",
}

_ATTEMPT_KEYS: Keys = {
    "attempt": "integer: Which start of the job.",
    "verdict": "text: `well`, `found` or `unknown`.",
    "explanation": "text: The answer in one sentence.",
    "ranks": (ListOf(keys_of({
        "rank": "integer: Rank.",
        "state": (
            "text: `ended`, `raised`, `died`, `silent` (of another machine, no heartbeat), `stuck`, "
            "`waits`, `running`, `unknown` (left nothing that tells), `missing` (recorded nothing), "
            "`not_asked` (GRADTRACE_RANKS left it out)."
        ),
        "sentence": "text: All of it in words.",
        "host": "text?: Machine.",
        "pid": "integer?: Process.",
        "last_seen_unix_ns": "integer?: Last sign of life.",
        "idle_seconds": "number?: For how long nothing has happened, of a rank that lives.",
        "doing": (OrNull(keys_of({
            **_THREAD_KEYS,
            "since_unix_ns": "integer: Since when, by the wall clock.",
            "for_seconds": "number?: For how long, of a rank that lives.",
        })), "What it does, or did last."),
        "threads": (ListOf(keys_of(_THREAD_KEYS)), "The same of all threads."),
        "waits": (OrNull(keys_of({
            "rank": "integer: The rank itself.",
            "step": "integer: Step.",
            "microbatch": "integer: Microbatch.",
            "backward_index": "integer: Backward pass.",
            "bucket_index": "integer: Bucket.",
            "parameter_fqns": "[text]: Its parameters.",
            "group": "text?: Process group.",
            "collective_seq": "integer?: Number of the collective in c10d.",
            "launched_ns": "integer: When it was launched.",
            "absent": "[integer]: Ranks that have launched nothing.",
            "others": (
                "[[anything]]: Ranks that launched something else in its place: rank, step, bucket, "
                "parameters."
            ),
            "for_ranks": "[integer]: All ranks that it waits for.",
        })), "The bucket that it launched and that was not reduced."),
        "stage": (OrNull(keys_of({
            "rank": "integer: The rank itself.",
            "step": "integer: Step.",
            "microbatch": "integer: Microbatch.",
            "stage_index": "integer?: Pipeline stage.",
            "kind": "text: Action, or what it waits for.",
            "start_ns": "integer: When it began.",
            "error": "text?: Exception with which it ended.",
            "other_stage": "integer?: Stage that a wait is for.",
            "for_ranks": "[integer]: Ranks that hold that stage.",
            "told": "text: The same in words.",
        })), "Action or wait of a pipeline stage that did not end as it should."),
        "exception": (
            OrNull(MapOf("column of the table `failures`", ANYTHING)), "The last exception that left a backward pass.",
        ),
        "exception_count": "integer: How many exceptions did.",
        "went_on": "boolean: Whether it ran backward passes after that.",
        "uncaught": "[text]?: Class and text of the exception that ended the process.",
        "dropped": (MapOf("table", keys_of({
            "rows": "integer: Rows that had no room in the journal.",
            "first_step": "integer?: Their first step.",
            "last_step": "integer?: Their last step.",
        })), "What a full or slow disk cost."),
    })), "Each rank."),
}

FAILURES = keys_of({
    "run": "text: Name of the run.",
    **_ATTEMPT_KEYS,
    "before": (ListOf(keys_of(_ATTEMPT_KEYS)), "The same of the attempts that it continues, the oldest first.",
        "where it continues some"),
})

INFO = keys_of({
    "runs": (ListOf(keys_of({
        "run": "text: Name of the run.",
        "path": "text: Its directory.",
        "attempt": "integer: Which start of the job was read; of several, the newest.",
        "attempts": "[integer]: All that there are.",
        "history": (ListOf(keys_of({
            "attempt": "integer: Which start of the job.",
            "first": "integer?: First step that it recorded.",
            "last": "integer?: Last step.",
            "step_shift": "integer: What is added to the steps' own numbers.",
            "joined_by": "text?: What says which step it goes on with: `framework`, `offset`, `job`, `parameters`.",
            "why_not": "text?: Why it does not continue them.",
            "same_parameters": "boolean?: Whether it began with the parameters that were there before, bit for bit.",
            "repeated": "[integer]?: First and last of the steps that were done before.",
            "gap": "[integer]?: First and last of the steps in between that are not there.",
            "read": "[integer]?: First and last of its steps that are read.",
            "ending": "text: How it ended.",
            "sentence": "text: All of it in words.",
        })), "Of a run with several attempts, each that recorded anything."),
        "hosts": "[text]: Machines.",
        "devices": "[text]: Kinds of device.",
        "versions": (MapOf("program", ListOf(TEXT)), "Versions, all that some rank gave."),
        "settings": (MapOf("setting", ListOf(TEXT)), "Settings, all that some rank gave."),
        "world_size": "integer?: Ranks of the job.",
        "ranks": (keys_of({
            "present": "[integer]: Ranks that recorded something.",
            "missing": "[integer]: Ranks that recorded nothing.",
            "incomplete": "[integer]: Ranks whose recording was not closed.",
        }), "Which ranks there are."),
        "flight": (OrNull(keys_of({
            "steps": "integer: Steps that are kept.",
            "held": "text?: Steps that are there.",
            "triggers": "[text]: What was written out, and why.",
            "went_early": "integer: Steps that the journal had no room for.",
        })), "Of a flight recording."),
        "steps": (keys_of({
            "first": "integer?: First step.",
            "last": "integer?: Last step.",
            "count": "integer: How many.",
        }), "Which steps there are."),
        "tables": (ListOf(keys_of({
            "table": "text: Table.",
            "rows": "integer: Its rows.",
            "parts": "integer: Its Parquet parts.",
            "bytes": "integer: Their size.",
            "journal_rows": "integer: Rows that lie in no part yet.",
        })), "Which tables there are."),
        "dropped": (MapOf("table or reason", INTEGER), "Rows that had no room."),
        "unsummarised": (MapOf("reason", INTEGER), "Tensors without a summary."),
        "replay_skipped": (MapOf("reason", INTEGER), "Nodes that were chosen for a replay and not run again."),
        "problems": "[text]: What the recorder gave up.",
        "observers": "[text]: Who watched the Nodes.",
        "left_to_python": (MapOf("reason", INTEGER), "Backward passes that the native observer did not watch."),
        "launcher": (keys_of({
            "kind": "[text]: What started the ranks.",
            "found_by": "[text]: How they found each other: `store`, `ids`, `address`, `parent`, `world` or `alone`.",
        }), "How the job was started."),
        "recorder_share": "number?: The recorder's own time, as a fraction of the steps' time.",
        "notices": "[text]: What stderr says of the run.",
    })), "Each run, in the order given."),
})

_RUN_KEYS: Keys = {
    "run": "text: Name of the run.",
    "attempt": "integer: Which start of the job.",
    "steps": "text?: What `--step` asked for.",
}

_BUCKET_KEYS: Keys = {
    "group": "text?: Process group.",
    "root": "integer?: Root module.",
    "module_fqn": "text?: Module that is wrapped.",
    "layout_index": "integer?: Which layout of buckets: DDP makes another after the first pass.",
    "bucket_index": "integer: Bucket of that layout.",
    "parameter_fqns": "[text]: Its parameters, in buffer order.",
    "parameter_count": "integer: How many.",
    "size_bytes": "integer: Size of the buffer.",
}

_BUCKET = keys_of(_BUCKET_KEYS, name="bucket")
TIMING = keys_of({
    **_RUN_KEYS,
    "summary": (keys_of({
        "ranks": (ListOf(keys_of({
            "rank": "integer: Rank.",
            "step_count": "integer: Closed steps.",
            "median_step_ns": "integer: A step, median.",
            "median_forward_ns": "integer: Its forward.",
            "median_backward_ns": "integer: Its backward passes.",
            "median_optimizer_ns": "integer: Its optimizer steps.",
            "total_step_ns": "integer: All steps.",
            "total_forward_ns": "integer: All forwards.",
            "total_backward_ns": "integer: All backward passes.",
            "total_optimizer_ns": "integer: All optimizer steps.",
            "recorder_share": "number?: The recorder's own share of the steps' time.",
        })), "Each rank."),
        "headlines": "[text]: What `--buckets` would say first.",
        "stage_headlines": "[text]: What `--stages` would say first.",
    }), "Where the time of a step goes.", "without `--buckets` and `--stages`"),
    "buckets": (keys_of({
        "median_step_ns": "integer?: A step, median.",
        "groups": (ListOf(keys_of({
            "group": "text?: Process group.",
            "ranks": "[integer]: Its ranks.",
            "missing_ranks": "[integer]: Those that were not recorded.",
            "reduction_count": "integer: Reductions that were paired.",
            "pass_count": "integer: Backward passes.",
            "worst_lag_ns": "integer: Largest lag of a pass, median over passes.",
            "floor_ns": "integer: Lag below which nobody is late.",
            "floor_reason": "text: Where that comes from.",
            "leaving_ns": "integer: How far apart ranks leave a reduction, median.",
            "straggler": "integer?: Rank that the others wait for.",
            "also_late": "[integer]?: Others that are late as steadily.",
            "onset": (OrNull(keys_of({
                "place": "text: `begin`, `bucket` or `gradual`.",
                "bucket": (_BUCKET, "First bucket at which it is late."),
                "previous": (OrNull(_BUCKET), "The one before it."),
                "growth_ns": "integer: What the lag grows there.",
                "lag_ns": "integer: Largest lag of a pass.",
                "pass_count": "integer: Late passes.",
                "modules": "[text]: Modules of the bucket's parameters.",
                "node": (OrNull(keys_of({
                    "node_name": "text: Node.",
                    "module_fqn": "text?: Its module.",
                    "step": "integer: Step that was looked at.",
                    "own_ns": "integer: What it took on the late rank.",
                    "other_rank": "integer: Rank it is held against.",
                    "other_ns": "integer: What it took there.",
                })), "Node that took so much longer there."),
            })), "Where in a backward pass the straggler falls behind."),
            "reason": "text?: Why no rank is named: `small`, `split`, `most`, `few` or `none`.",
            "lags": (ListOf(keys_of({
                "rank": "integer: Rank.",
                "last_count": "integer: Reductions it launches last.",
                "late_count": "integer: Of these, beyond the floor.",
                "median_late_ns": "integer?: Lag in those, median.",
                "largest_late_ns": "integer?: Largest.",
                "largest_step": "integer?: Its step.",
                "pass_count": "integer: Backward passes.",
                "pass_lag_ns": "integer: Largest lag of a pass, median.",
                "late_pass_count": "integer: Passes beyond the floor.",
                "delaying_pass_count": "integer: Passes in which no rank was later.",
            })), "How each rank launches."),
            "explanation": "text: The answer in words.",
        })), "Each group that reduces."),
        "buckets": (ListOf(keys_of({
            **_BUCKET_KEYS,
            "reduction_count": "integer: Reductions.",
            "transport_ns": "integer?: From the last launch to the end, median.",
            "ready_to_launch_ns": "integer?: From its first gradient to its launch, median.",
            "hidden_share": "number?: Share of its time that backward hides.",
            "ranks": (ListOf(keys_of({
                "rank": "integer: Rank.",
                "launch_count": "integer: How often it launched.",
                "ready_to_launch_ns": "integer?: From its first gradient to its launch, median.",
                "wait_ns": "integer?: Wait for the last rank.",
                "own_ns": "integer?: From its own launch to the end.",
                "hidden_share": "number?: Share that backward hides.",
                "exposed_ns": "integer?: What is not hidden.",
            })), "Each rank (medians)."),
        })), "Each bucket."),
        "other_buckets": (ListOf(keys_of({
            "kind": "text: Kind of reduction.",
            **_BUCKET_KEYS,
            "rank_count": "integer: Ranks that launched it.",
            "launch_count": "integer: How often, on all ranks.",
            "own_ns": "integer?: From launch to end, median.",
            "ready_to_launch_ns": "integer?: From its first gradient to its launch, median.",
        })), "Buckets that no answer above is about."),
        "totals": (ListOf(keys_of({
            "rank": "integer: Rank.",
            "step_count": "integer: Steps in which it reduced.",
            "exposed_ns": "integer: Time that backward does not hide, median of a step.",
            "largest_ns": "integer: Largest.",
            "largest_step": "integer: Its step.",
            "waiting_ns": "integer: Of the median, waiting for the last rank.",
            "exposed_share": "number?: Share of those steps.",
            "waiting_share": "number?: Share of those steps.",
        })), "What reductions cost each rank."),
        "clocks": (ListOf(keys_of({
            "host": "text: Host.",
            "reference": "text: Host whose clock it was laid over.",
            "offset_ns": "integer: What its times are ahead.",
            "spread_ns": "integer: Half of the reductions lie this close.",
            "reduction_count": "integer: Reductions that tell.",
        })), "How hosts' clocks were laid over each other."),
        "notes": "[text]: What is missing.",
        "explanation": "text: The answer in words.",
    }), "The reductions of gradient buckets.", "with `--buckets`"),
    "stages": (keys_of({
        "steps": "[integer]: Steps that were used.",
        "warm_up_step": "integer?: The first step, where it was left out.",
        "pipelines": "integer: Pipelines side by side.",
        "window_ns": "integer: From a step's first action to its last, mean.",
        "slowest": (keys_of({
            "stage_index": "integer?: Stage with most load.",
            "load_ns": "integer: What it takes for a microbatch.",
            "other_ns": "integer: What the others take.",
            "sample_count": "integer: Microbatches.",
            "slower_count": "integer: Microbatches in which it was the slower.",
            "reason": "text?: Why none is named: `one`, `few`, `even` or `unsure`.",
            "is_slow": "boolean: Whether it is named.",
            "ranks": "[integer]?: Ranks that hold it.",
            "kind": "text?: The one part that makes it slow.",
            "parts": (ListOf(keys_of({
                "kind": "text: Action.",
                "own_ns": "integer: What it takes.",
                "other_ns": "integer?: Median of the other stages.",
                "count": "number: Such actions in a microbatch.",
                "excess_ns": "integer: What it takes more, in a microbatch.",
            })), "The parts that make it slow."),
            "place": (OrNull(keys_of({
                "what": "text: `node` or `module`.",
                "module_fqn": "text?: Module.",
                "name": "text: Node, or class of the module.",
                "own_ns": "integer: What it takes in an action.",
                "part_ns": "integer: What the action takes.",
                "other_ns": "integer?: Most that its like takes elsewhere.",
                "other_stage": "integer?: Where.",
            })), "Where most of that time is."),
        }), "Whether one stage is slow."),
        "slow_link": (OrNull(keys_of({
            "what": "text: `activations` or `gradients`.",
            "from_stage": "integer: Stage that sends.",
            "to_stage": "integer: Stage that receives.",
            "count": "integer: Receives.",
            "transfer_ns": "integer: From the sender's having it to the end, median.",
            "other_ns": "integer: The same of other links.",
        })), "What reaches a stage late though its sender had made it."),
        "kinds": (ListOf(keys_of({
            "stage_index": "integer?: Stage.",
            "kind": "text: Action or wait.",
            "ranks": "[integer]: Ranks that hold the stage.",
            "count": "integer: How many.",
            "median_ns": "integer: Median.",
            "p95_ns": "integer: Of 95 in 100, the longest.",
            "total_ns": "integer: All together.",
        })), "Actions by stage and kind."),
        "idle": (ListOf(keys_of({
            "rank": "integer: Rank.",
            "stages": "[integer]: Stages that it holds.",
            "step_count": "integer: Steps.",
            "window_ns": "integer: The pipeline's step, mean.",
            "busy_ns": "integer: Of it, in actions.",
            "bubble_ns": "integer: Of it, in none.",
            "bubble_share": "number: The same as a share.",
            "waits": (ListOf(keys_of({
                "kind": "text: What it waits for.",
                "stage_index": "integer?: Its stage.",
                "other_stage": "integer?: Stage that it waits for.",
                "wait_ns": "integer: Of a step, mean.",
                "share": "number: The same as a share.",
            })), "The bubble by what it waited for, the longest first."),
            "early_ns": "integer: Bubble after the last thing that it did in the window.",
            "other_ns": "integer: Bubble in no wait that was recorded.",
        })), "Each rank's bubble."),
        "hand_overs": (ListOf(keys_of({
            "what": "text: `activations` or `gradients`.",
            "from_stage": "integer: Stage that sends.",
            "to_stage": "integer: Stage that receives.",
            "count": "integer: Waits.",
            "wait_ns": "integer: A wait, median.",
            "late_ns": "integer: Of it, before the sender had it.",
            "transfer_ns": "integer: Of it, after.",
            "p95_transfer_ns": "integer: Of 95 in 100 transfers, the longest.",
        })), "What stages on different ranks receive from each other."),
        "chart": (OrNull(keys_of({
            "step": "integer: Step that is drawn.",
            "line": "integer: Which of the pipelines.",
            "length_ns": "integer: From its first action to its last.",
            "lanes": (ListOf(keys_of({
                "rank": "integer: Rank.",
                "stage_index": "integer?: Stage; null: waits outside any.",
                "bars": (ListOf(keys_of({
                    "kind": "text: Action or wait.",
                    "microbatch": "integer: Microbatch.",
                    "start_ns": "integer: Since the chart's beginning.",
                    "end_ns": "integer: Since the chart's beginning.",
                })), "Its actions and waits."),
            })), "Its lines."),
        })), "One step, to be drawn."),
        "clocks": (ListOf(keys_of({
            "host": "text: Host.",
            "reference": "text: Host whose clock it was laid over.",
            "offset_ns": "integer: What its times are ahead.",
            "error_ns": "integer?: How far that may be off; null: nothing was sent back.",
            "message_count": "integer: Messages that tell.",
        })), "How hosts' clocks were laid over each other."),
        "recorder_share": "number?: The recorder's own share of the steps' time.",
        "notes": "[text]: What is missing.",
        "explanation": "text: The answer in words.",
    }), "Pipeline stages.", "with `--stages`"),
})

# By command, in the order of the reference page.
# One law. `analyzer laws` gives a list of them; asked for one, the object alone.
LAW = keys_of({
    "law": "text: Name of the law.",
    "severity": "text: `error` or `warning`.",
    "unit": "text: What it is judged by.",
    "meaning": "text: What holds where it is kept.",
    "after": "[text]: Laws it stands after in the chain of a step.",
    "explained_by": "[text]: Laws that, broken in the same step, explain it.",
})

DOCTOR = keys_of({
    "verdict": "text: `well`, `wrong` or `unknown`.",
    "explanation": "text: The answer in words.",
    "findings": (ListOf(keys_of({
        "name": "text: What was looked at.",
        "mark": "text: `ok`, `note` (nothing is lost by it), `wrong` or `unknown`.",
        "said": "text: What was found.",
        "advice": "text?: What would help.",
    })), "What was found, in the order in which a job meets it."),
    "python": "text?: Python that would run the job; null of a run.",
    "trial": (OrNull(keys_of({
        "model": "text: What was trained.",
        "observer": "text: `native` or `python`.",
        "steps": "integer: Steps of a round, at least.",
        "bare_ns": "integer: Processor time of a step without recording, median.",
        "recorded_ns": "integer: The same, recorded.",
        "ratio": "number: The one by the other.",
    })), "The small job, bare and recorded; null of a run, or where none came to its end."),
    "run": "text?: Name of the run; null of a place where a job would be started.",
    "attempt": "integer?: Attempt that was read.",
    "ranks": (OrNull(ListOf(keys_of({
        "rank": "integer: Rank of the job.",
        "state": "text: As `analyzer failures` has it.",
        "first_step": "integer?: First step that ended.",
        "last_step": "integer?: Last step that ended.",
        "step_count": "integer: Steps that ended.",
        "tables": "[text]: Tables of which it left rows.",
    }))), "Ranks of the run's world."),
})

# By command.
ANSWERS = {
    "diff": DIFF, "check": CHECK, "failures": FAILURES, "timing": TIMING, "info": INFO, "laws": LAW, "doctor": DOCTOR,
}
