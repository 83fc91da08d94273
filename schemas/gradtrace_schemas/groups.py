"""Tables of what connects ranks: process groups, DDP buckets, and the ranks themselves."""

from gradtrace_schemas.table import (
    ATTEMPT,
    BACKWARD_INDEX,
    BOOL,
    IDENTITY,
    INT32,
    INT64,
    MICROBATCH,
    MODULE_FQN,
    RANK,
    RECORD_INDEX,
    ROOT,
    STRING,
    STRINGS,
    Column,
    SummaryColumns,
    Table,
    nullable,
    since,
)

_REDUCING_ROOT = nullable(ROOT, "Root of the module whose gradients it reduces.")
_REDUCING_MODULE = nullable(
    MODULE_FQN, "That module: what DDP (or `replicate`, `fully_shard`) wraps; empty for the root."
)

BUCKETS = Table(
    name="buckets",
    version=3,
    doc="One row per gradient bucket that was reduced: of DDP, or a parameter group of FSDP2.",
    key=("attempt", "rank", "step", "backward_index", "root", "module_fqn", "bucket_index"),
    entries=(
        *IDENTITY,
        MICROBATCH,
        BACKWARD_INDEX,
        RECORD_INDEX,
        Column(
            "bucket_index", INT32, "DDP's own number; buckets are rebuilt after the first pass."
        ),
        Column("is_last", BOOL, "Whether DDP calls it the last of the pass."),
        Column(
            "hook_name",
            STRING,
            "The communication hook that reduced it: module and name, torch's own without "
            "`torch.distributed.algorithms.ddp_comm_hooks.`; null for DDP's own reduction.",
            nullable=True,
        ),
        Column("group", STRING, "Name of the process group.", True),
        Column("parameter_fqns", STRINGS, "Its parameters, in buffer order."),
        Column("size_bytes", INT64, "Size of the flat buffer."),
        Column("ready_ns", INT64, "Its first gradient was ready.", True),
        Column("launched_ns", INT64, "Its hook was called."),
        Column("done_ns", INT64, "Its future was done; null when that was never seen.", True),
        since(
            6,
            Column(
                "device_ns",
                INT64,
                "Time on the device from the call of its hook to the end of its reduction, where events were recorded.",
                True,
            ),
        ),
        since(2, _REDUCING_ROOT),
        since(2, _REDUCING_MODULE),
        Column(
            "kind",
            STRING,
            "`all_reduce` (DDP's), `shadow` (of zeros, by a rank whose inputs ran out under `join`), "
            "`reduce_scatter` (FSDP2's).",
            nullable=True,
            since=2,
        ),
        Column(
            "layout_index",
            INT32,
            "Which arrangement of parameters into buckets it belongs to, from 0: DDP rebuilds them after the "
            "first pass.",
            nullable=True,
            since=2,
        ),
        Column(
            "divisor",
            INT32,
            "What the recorder divided by on DDP's behalf; null where a hook of the job reduced.",
            nullable=True,
            since=2,
        ),
        Column(
            "collective_seq",
            INT64,
            "c10d's number of the group's latest collective when the hook had returned: what ranks reduced "
            "together has the same.",
            nullable=True,
            since=2,
        ),
        Column("numel", INT64, "Elements of the flat buffer.", nullable=True, since=2),
        Column("dtype", STRING, "dtype of the flat buffer.", nullable=True, since=2),
        SummaryColumns("before_", "The buffer that went into the reduction"),
        SummaryColumns("after_", "The buffer that came out of it"),
    ),
)

GROUPS = Table(
    name="groups",
    version=2,
    doc="One row per process group that a rank belongs to, and one per module whose gradients are reduced over it.",
    key=("attempt", "rank", "name", "root", "module_fqn"),
    entries=(
        *IDENTITY,
        MICROBATCH,
        RECORD_INDEX,
        Column("name", STRING, "c10d's name of the group."),
        Column("ranks", STRING, "Global ranks, as a JSON list."),
        Column("backend", STRING, "Backend.", True),
        Column("role", STRING, "`dp`, `tp` or `pp`, where it is known.", True),
        since(2, _REDUCING_ROOT),
        since(2, _REDUCING_MODULE),
        Column(
            "hook_name",
            STRING,
            "The communication hook in use, as in `buckets`; null for DDP's own.",
            nullable=True,
            since=2,
        ),
        Column(
            "unobserved",
            STRING,
            "Why the reductions of this module are not recorded; null where they are.",
            nullable=True,
            since=2,
        ),
    ),
)

RANKS = Table(
    name="ranks",
    version=3,
    doc="One row per rank's recording.",
    key=("attempt", "rank"),
    journalled=False,
    entries=(
        ATTEMPT,
        RANK,
        Column("world_size", INT32, "Ranks of the job."),
        Column("local_rank", INT32, "Rank within the host.", True),
        Column("host", STRING, "Name of the host."),
        Column("pid", INT64, "Process."),
        Column("device", STRING, "Device type of the job's first root module.", True),
        Column("versions", STRING, "Versions of Python, torch, gradtrace, as JSON."),
        Column("settings", STRING, "The recorder's settings, as JSON."),
        Column(
            "environment",
            STRING,
            "What changes numbers, as it stood at the rank's first event, as JSON: torch's switches (threads, default "
            "dtype, determinism, TF32, cuDNN, attention, autocast), and the variables PYTHONHASHSEED, ATEN_*, "
            "CUBLAS_*, CUBLASLT_*, CUDA_*, CUDNN_*, DNNL_*, GLOO_*, HSA_*, KMP_*, MIOPEN_*, MKL_*, NCCL_*, NVIDIA_*, "
            "OMP_*, ONEDNN_*, OPENBLAS_*, PYTORCH_*, RCCL_*, ROCBLAS_*, TORCHDYNAMO_*, TORCHINDUCTOR_*, TORCH_*, "
            "TRITON_*, XLA_*, but for places, names of machines, logs, and what sounds like a secret.",
        ),
        Column(
            "command", STRING, "Command line, as a JSON list; what sounds like a secret is masked."
        ),
        since(
            5,
            Column(
                "git_commit",
                STRING,
                "The commit that was checked out around the job's script, null where there is none. Whether files "
                "were changed since is not known.",
                nullable=True,
            ),
        ),
        since(
            7,
            Column(
                "step_rule",
                STRING,
                "What ends its steps: `optimizers`, `parameters` (no torch optimizer was seen: they changed between "
                "two passes), `job` (`gradtrace_recorder.step`); null where nothing ended one.",
                nullable=True,
            ),
        ),
        since(
            7,
            Column(
                "first_step_from",
                STRING,
                "Why its first step has its number: `framework` (its counter), `offset` (GRADTRACE_STEP_OFFSET), `0`.",
                nullable=True,
            ),
        ),
        Column("complete", BOOL, "Whether the recording was closed by the rank itself."),
        Column("last_step", INT32, "Last step that it recorded anything of.", True),
        Column("recorded", STRING, "Rows recorded, by table, as JSON."),
        Column("dropped", STRING, "Rows dropped, by reason, as JSON."),
        Column(
            "dropped_steps",
            STRING,
            "First and last step of which rows were dropped, by reason, as JSON.",
            nullable=True,
            since=3,
        ),
        Column("unsummarised", STRING, "Tensors without a summary, by reason, as JSON."),
        Column(
            "replay_skipped",
            STRING,
            "Nodes that were chosen for a replay and not run again, by reason, as JSON.",
            nullable=True,
            since=3,
        ),
        Column(
            "overwritten",
            STRING,
            "Rows of older steps that a flight recording let go of, by table, as JSON.",
            nullable=True,
            since=3,
        ),
        Column("problems", STRING, "What went wrong inside the recorder, as a JSON list."),
        Column("wall_start_ns", INT64, "Wall clock (Unix) at the recording's time 0."),
        Column("wall_end_ns", INT64, "Wall clock at its end.", True),
        Column("monotonic_start_ns", INT64, "Host's monotonic clock at the recording's time 0."),
    ),
)
