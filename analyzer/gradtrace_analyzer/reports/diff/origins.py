"""An origin in words: where it is, how large, and what was equal before it."""

from __future__ import annotations

from dataclasses import replace

from gradtrace_analyzer.diff.answer import Answer
from gradtrace_analyzer.diff.difference import LENGTHS, Change
from gradtrace_analyzer.diff.findings.replays import replay_sentence
from gradtrace_analyzer.diff.findings.rerun_nodes import RerunNode
from gradtrace_analyzer.diff.origin import Origin
from gradtrace_analyzer.failures.failed_passes import OneSidedFailure
from gradtrace_analyzer.numerics.model import MODEL
from gradtrace_analyzer.reports.diff.grounds import (
    gradient_of_one,
    if_known,
    in_microbatch,
    nodes_equal,
    output_sentence,
    unless_known,
    unread,
    update_grounds,
)
from gradtrace_analyzer.reports.diff.places import (
    and_others,
    bucket_of,
    module_of,
    node_phrase,
    parameter_of,
    place_of,
    row_name,
    size_of,
    size_phrase,
)
from gradtrace_analyzer.reports.diff.structure import code_sentence
from gradtrace_analyzer.words.nouns import module_phrase
from gradtrace_analyzer.words.numbers import and_more, noun, number, ranks_phrase


def unseen_sentence(origin: Origin, answer: Answer) -> str:
    """The first recorded difference, where what lies in front of it was not recorded or not compared."""
    if origin.code:
        return origin_sentence(origin)
    differs = (
        f"is in the {origin.difference.only_in} alone"
        if origin.difference.only_in
        else size_phrase(origin)
    )
    alone = len(answer.unseen) == 1 and answer.unseen[0].startswith(("rank ", "step "))
    were = "was" if alone else "were"
    return (
        f"Step {origin.step}, {ranks_phrase(origin.ranks)}: {row_name(origin)}{and_others(origin)} {differs}. "
        f"It is the first difference among what was compared; what came before may be its cause, since "
        f"{', '.join(answer.unseen)} {were} not compared."
    )


def origin_sentence(origin: Origin) -> str:
    """The sentence of an origin before which everything was compared."""
    d, where = origin.difference, f"Step {origin.step}, {_who(origin)}: "
    size = size_phrase(origin)
    module = module_of(origin, origin.module_fqn)
    if origin.failure is not None:
        return where + failure_clause(origin.failure)
    if origin.code:
        return code_sentence(origin, size, _follower(origin))
    if origin.link == "structure" and "kind" in d.values:
        said = {"grad": "autograd.grad(), which accumulates nothing,", "backward": "backward()"}
        a, b = (said.get(v, v) for v in d.values["kind"])
        return (
            f"{where}backward pass {d.key['backward_index']} is {b} in the candidate and {a} in the "
            "baseline; all that was recorded before it is equal."
        )
    if origin.link == "structure" and d.table == "gradients" and d.key["point"] == "final":
        return where + gradient_of_one(origin)
    if origin.link == "structure":
        lone = f"{where}{row_name(origin)} is in the {d.only_in} alone"
        return f"{lone}; all that was recorded before it is equal."
    if "requires_grad" in d.values:
        return where + _frozen(origin)
    if origin.link == "parameters":
        since = if_known(origin, "left", "changed since the step before: it ")
        what = since if origin.step else "differs from the start: it "
        unknown = "; what the step before left was not recorded on both sides" if not what else ""
        return (
            f"{where}{parameter_of(origin)}{and_others(origin)} {what}{size} "
            f"before the step's first forward{unknown}."
        )
    if origin.link == "inputs":
        return f"{where}the input {d.key['name']!r}{and_others(origin)} {size}."
    if origin.link == "rng":
        return (
            f"{where}the random generator stands elsewhere when the step begins, for the first time; "
            f"{module_of(origin, d.key['module_fqn'])} is the first to show it: what it "
            f"{'receives' if origin.between else 'returns'} {size}."
        )
    if origin.link == "forward" and origin.between:
        equal = if_known(
            origin, "outputs", ", although the outputs of all modules before it are equal"
        )
        return (
            f"{where}what {module_of(origin, d.key['module_fqn'])} receives{in_microbatch(origin)} {size}{equal}: "
            f"the code of {module} in front of it is where they part."
        )
    if origin.link == "forward":
        return where + output_sentence(origin, module, size)
    if origin.link == "loss":
        a, b = d.values.get("loss", (None, None))
        scaled = ""
        if origin.factor is not None:
            scaled = (
                f" and the gradient that leaves it is {origin.factor:.4g} times the baseline's,"
            )
        aside = " that it depends on" if origin.aside is not None else ""
        loss = f"{where}the loss is {number(b)} instead of {number(a)}{',' * bool(scaled)}{scaled.rstrip(',')}"
        if "outputs" not in origin.rests_on:
            return (
                f"{loss}: what modules gave was not recorded on both sides, so the code between the model and "
                f"backward() or what came before is where they part.{_aside(origin)}{_rescaled(origin)}"
            )
        return (
            f"{loss}, although the outputs of all modules{aside} are equal: the code between the model and "
            f"backward() is where they part.{_aside(origin)}{_rescaled(origin)}"
        )
    if origin.link == "backward" and origin.gradient_counts is not None:
        a, b = origin.gradient_counts
        verb = "receives" if origin.between else "gives"
        index = d.key["backward_index"]
        in_pass = "" if index is None else f", in backward pass {index}"
        return (
            f"{where}{module} ({origin.node_name}) {verb} {b} {noun(b, 'gradient')} instead of {a}"
            f"{in_pass}: {'the pass' if in_pass else 'a pass'} asks for other gradients, or the graph is another."
        )
    if origin.link == "backward" and origin.between:
        equal = if_known(
            origin, "nodes", ", although all Nodes that ran before gave equal gradients"
        )
        return (
            f"{where}the gradient arriving at {node_phrase(origin)} {size}{equal}: a tensor hook, the gradient given "
            f"to backward(), or code outside any Node changed it.{_aside(origin)}{_rescaled(origin)}"
        )
    if origin.link == "backward" and origin.positions:
        which = ", ".join(map(str, origin.positions))
        return (
            f"{where}{noun(len(origin.positions), 'gradient')} {which} of the {origin.position_count} that leave "
            f"{node_phrase(origin)} {size}{_again(origin)}, although the others"
            f"{if_known(origin, 'reads', ', and everything recorded that it reads,')} are equal"
            f"{_rounding(origin)}.{_why(origin)}"
        )
    if origin.link == "backward":
        return (
            f"{where}the gradient leaving {node_phrase(origin)} {size}{_again(origin)}"
            f"{if_known(origin, 'reads', ', although everything recorded that it reads is equal')}"
            f"{_rounding(origin)}.{unread(origin)}{_why(origin)}"
        )
    if origin.link == "carried_gradient" and d.only_in is not None:
        return (
            f"{where}{parameter_of(origin)}{and_others(origin)} begins the step with a gradient left in "
            f".grad, in the {d.only_in} alone."
        )
    if origin.link == "carried_gradient":
        return (
            f"{where}{parameter_of(origin)}{and_others(origin)} begins the step with another .grad: "
            f"it {size} before the first backward pass."
        )
    if d.table == "stage_events":
        return where + _handed_sentence(origin)
    if origin.link == "local_gradient" and origin.place is not None:
        return (
            f"{where}the gradient accumulated for {origin.parameter_fqn} {size}{nodes_equal(origin)}: something "
            "changed .grad since the microbatch before, or what came was not added as it is."
        )
    if origin.link == "local_gradient" and d.key["backward_index"]:
        index = d.key["backward_index"]
        return (
            f"{where}the gradient accumulated for {parameter_of(origin)}{and_others(origin)} in backward pass "
            f"{index} {size}{nodes_equal(origin)}: .grad was changed or cleared "
            f"between passes {index - 1} and {index}, or a hook on the parameter changed what came."
        )
    if origin.link == "local_gradient":
        return (
            f"{where}the gradient accumulated for {parameter_of(origin)} {size}{nodes_equal(origin)}: a hook on the "
            "parameter changed it."
        )
    if origin.link == "bucket":
        return where + _bucket_sentence(origin)
    if origin.link == "reduced_gradient":
        return (
            f"{where}the reduced gradient of {parameter_of(origin)}{and_others(origin)} {size}"
            f"{if_known(origin, 'local', ', although the local gradients are equal on all ranks')}: the reduction"
            f"{unless_known(origin, 'local', ', or what went into it,')} is where they part."
        )
    if origin.link == "clip" and origin.change is not None and origin.change.shown_by == "sums":
        return (
            f"{where}the gradient of {parameter_of(origin)}{and_others(origin)} that the optimizer saw {size}, "
            "although what was compared of the step before it, sums over the parts, is equal (they do not show what "
            "permutes rows, nor where a gradient that adds up to nothing turns)."
        )
    if origin.link == "clip":
        return (
            f"{where}the gradient of {parameter_of(origin)}{and_others(origin)} that the optimizer saw "
            f"{size}{if_known(origin, 'after backward', ', although it was equal after the backward pass')}: "
            f"{unless_known(origin, 'after backward', 'the backward pass, or ')}code between backward() and the "
            "optimizer's step (clipping, unscaling) is where they part."
        )
    if d.table == "optimizer_groups":
        return f"{where}{place_of(origin)} {size_of(origin)}."
    equal, unknown = update_grounds(origin)
    return (
        f"{where}{parameter_of(origin)}{and_others(origin)} {size} after the optimizer's step{equal}: {unknown}the "
        "optimizer, its state, or code that changed it in between is where they part."
    )


def _who(origin: Origin) -> str:
    """The origin's ranks, and where in a pipeline: `rank 1 (stage 1, microbatch 0, input half)`."""
    who = ranks_phrase(origin.ranks)
    return who if origin.place is None else f"{who} ({origin.place.said})"


def _handed_sentence(origin: Origin) -> str:
    what = "activations" if origin.difference.key["kind"] == "forward" else "gradient"
    if origin.link != "stage":
        made = f"what the stage makes for its neighbour (the {what})"
        return f"{made} {size_phrase(origin)}{if_known(origin, 'reads', ', although what it received is equal')}."
    rank, stage = origin.source or (None, None)
    sender = "its neighbour" if stage is None else f"stage {stage}"
    of_rank = "" if stage is None else f" (rank {rank})"
    differs = size_phrase(origin)
    if what == "activations":
        differs = differs.replace("differs", "differ", 1).replace("(it is", "(they are", 1)
    if "sender" not in origin.rests_on:
        return (
            f"the {what} that it received from {sender}{of_rank} {differs}; what {sender} made was not recorded on "
            "both sides."
        )
    return (
        f"the {what} that it received from {sender}{of_rank} {differs}, although {sender} made the same: the sending, "
        "the way or the receiving is where they part."
    )


def failure_clause(failure: OneSidedFailure) -> str:
    """Which pass failed where, why, and what it had reached: a sentence without its place in front."""
    return f"the {failure.side}'s backward pass {failure.backward_index} failed {failure.told}"


def _frozen(origin: Origin) -> str:
    """That a parameter asks for gradients on one side alone, and on which it is frozen."""
    side = "baseline" if origin.difference.values["requires_grad"][0] is False else "candidate"
    verb = "are" if origin.other_count else "is"
    also = "" if origin.change is None or not origin.change.differs else " Its value differs too."
    return (
        f"{parameter_of(origin)}{and_others(origin)} {verb} frozen in the {side}: requires_grad is False there and "
        f"True on the other side.{also}"
    )


def _why(origin: Origin) -> str:
    """What running the Node again says, or what of it was not seen: what it saved."""
    again = replay_sentence(origin.replays, origin.step)
    if again:
        return again
    if origin.rewritten is None:
        return _SAVED
    name = module_phrase(origin.rewritten, origin.root_name)
    equal, _ = update_grounds(origin)
    return (
        f" {name} was changed after the forward and before the step's end, in place or through .data: it differs after "
        f"the optimizer{equal.replace(', although', ' although', 1)}."
    )


def _rounding(origin: Origin) -> str:
    """What rounding would explain, where that is a number to hold the difference against."""
    change = origin.change
    if change is None or change.error is None or not change.tolerance:
        return ""
    if change.shown_by in LENGTHS:
        return f"; {length_words(change)}"
    if change.noise is not None:
        return f"; noise here is {change.tolerance / MODEL.scatter:.0e}, which would explain {change.tolerance:.1e}"
    return f"; rounding would explain {change.tolerance:.1e}"


def length_words(change: Change) -> str:
    """Why a length is too large or too small, where its direction is what rounding may make of it."""
    if change.shown_by == "steady":
        return "it is that much longer or shorter time after time, and rounding is never the same twice"
    return f"rounding would explain that it is longer or shorter by {change.tolerance:.1e}"


def _again(origin: Origin) -> str:
    """That the same place shows it in further passes of the step, and how often."""
    n = origin.repeat_count
    return f" (and {n} {noun(n, 'more time')} in the step, in other passes)" if n else ""


# A Node's saved tensors are its own: no row holds them.
_SAVED = (
    " What it saved in the forward is not recorded: its derivative is wrong, or an activation or a weight was changed "
    "after the forward, in place or through .data."
)


def _aside(origin: Origin) -> str:
    """That a forward before the origin differs, which no backward pass followed."""
    d = origin.aside
    if d is None:
        return ""
    return (
        f" (Call {d.key['call_index']} of the root module before it read other values; no backward() followed "
        "that call, and one factor explains the rest.)"
    )


def _rescaled(origin: Origin) -> str:
    """Where the origin's factor ends, because .grad was changed outside backward."""
    found = origin.rescaled
    if found is None:
        return ""
    how = "changed" if found.times is None else f"multiplied by {found.times:.4g}"
    where = "one of the runs alone" if found.side is None else f"the {found.side} alone"
    what = (
        "microbatches" if origin.difference.key.get("backward_index") is None else "backward passes"
    )
    return (
        f" That factor ends between {what} {found.after} and {found.backward_index}: there the .grad "
        f"of {found.parameter_fqn}{and_more(found.others)} was {how} outside backward, in {where}."
    )


def _bucket_sentence(origin: Origin) -> str:
    d, size = origin.difference, size_phrase(origin)
    if "ddp_sync" in d.values:
        said = {"sync": "reduces", "no_sync": "does not reduce (no_sync)"}
        a, b = (said.get(v, f"is {v}") for v in d.values["ddp_sync"])
        return (
            f"backward pass {d.key['backward_index']} {b} in the candidate and {a} in the baseline; "
            "all that was recorded before it is equal."
        )
    if d.values:
        changed = [f"{name} is {b} instead of {a}" for name, (a, b) in d.values.items()]
        return f"{bucket_of(origin)} is reduced otherwise: {'; '.join(changed)}."
    if origin.between:
        return (
            f"{bucket_of(origin)} {size} as it goes into its reduction"
            f"{if_known(origin, 'local', ', although the local gradients are equal')}: something changed them, or what "
            ".grad held, in between."
        )
    return (
        f"{bucket_of(origin)} {size} as it comes out of its reduction"
        f"{if_known(origin, 'reads', ', although what every rank put in is equal')}: the reduction"
        f"{unless_known(origin, 'reads', ', or what was put into it,')} is where they part."
    )


def _follower(origin: Origin) -> str:
    """The first difference that follows from changed code, in words."""
    d = origin.follower
    if d is None:
        return "nothing"
    row = replace(origin, difference=d, code=(), module_fqn=d.key.get("module_fqn"))
    if d.table == "backward_passes":
        return "the loss"
    reads = d.reads is not None and d.reads.differs
    if d.table == "module_calls":
        return f"what {module_of(row, d.key['module_fqn'])} {'receives' if reads else 'returns'}"
    if d.table == "node_events":
        return f"the gradient {'arriving at' if reads else 'leaving'} {node_phrase(row)}"
    return row_name(row)


def nonfinite_sentence(origin: Origin) -> str:
    """Where the first value is that is finite on one side alone, and what it is on both."""
    d = origin.difference
    if d.table == "node_events":
        what = (
            f"the gradient {'arriving at' if origin.between else 'leaving'} {node_phrase(origin)}"
        )
    elif d.table == "module_calls":
        what = f"what {module_of(origin, d.key['module_fqn'])} {'receives' if origin.between else 'returns'}"
    elif d.table == "inputs":
        what = f"the input {d.key['name']!r}"
    elif d.table == "buckets":
        what = f"{bucket_of(origin)} as it {'goes into' if origin.between else 'comes out of'} its reduction"
    elif d.table == "stage_events":
        what = f"what stage {d.key['stage_index']} {'receives' if origin.between else 'sends'}"
    else:
        what = row_name(origin)
    return (
        f"The first value that is finite on one side alone: step {origin.step}, "
        f"{ranks_phrase(origin.ranks)}, {what} {size_phrase(origin)}."
    )


def repeated_sentence(found: RerunNode) -> str:
    """A Node that ran again, with a multiple of what arrived before."""
    return (
        f"Backward pass {found.backward_index}, of the {found.side} alone, runs Nodes of backward pass "
        f"{found.before} again: at {module_phrase(found.module_fqn)} ({found.node_name}, call {found.call_index}) "
        f"{found.times:.4g} times the gradient of before arrives, though at {found.equal_count} other "
        f"{noun(found.equal_count, 'Node')} the same: a path is counted more than once."
    )
