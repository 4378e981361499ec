"""``JobConfig``, the whole configuration of a job, and the dataclass of each of its groups of keys."""

from dataclasses import dataclass, field
from typing import Any

from megatron_ft.config.checkpoint import CheckpointConfig
from megatron_ft.config.model import ModelConfig, PrecisionConfig
from megatron_ft.config.placement import PlacementConfig
from megatron_ft.config.telemetry import TelemetryConfig

MAX_DEFAULT_WARMUP = 10
"""Largest number of warm-up iterations that is chosen if ``lr_warmup_iterations`` is null."""


@dataclass
class ParallelConfig:
    """Sizes of the parallel groups. The data-parallel size is the number of ranks divided by (TP * PP * CP)."""

    tensor_model_parallel_size: int = 1
    """Number of ranks that split each matrix (TP). Above 1, sequence parallelism is used, too."""
    pipeline_model_parallel_size: int = 1
    """Number of pipeline stages (PP)."""
    virtual_pipeline_model_parallel_size: int | None = None
    """Number of model chunks per pipeline stage (VPP); null means one."""
    expert_model_parallel_size: int = 1
    """Number of ranks over which the experts of a layer are distributed (EP). It must divide the number of experts. EP
    times ``expert_tensor_parallel_size`` must divide the number of ranks of a pipeline stage (TP * CP * DP)."""
    expert_tensor_parallel_size: int = 1
    """Number of ranks that split the matrices of one expert; must be 1 with gloo."""
    context_parallel_size: int = 1
    """Number of ranks that split a sequence (CP). A value above 1 needs Transformer Engine."""
    use_distributed_optimizer: bool = True
    """Shard master weights and moments over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass runs."""
    overlap_param_gather: bool = False
    """Gather parameters during the next forward pass. Must be false, because an iteration must gather its
    updated parameters before the next iteration begins."""
    device_backend: str = "auto"
    """Backend of the process groups for the model's tensors: ``nccl``, ``gloo`` or ``auto`` (NCCL on CUDA, gloo on
    CPU). gloo on CUDA is slow, because it copies tensors through host memory; it is for tests without NCCL."""

    def backend_on(self, device: str) -> str:
        """Return the backend that ``device_backend`` selects on ``device``: ``nccl`` or ``gloo``."""
        if self.device_backend != "auto":
            return self.device_backend
        return "nccl" if device == "cuda" else "gloo"


@dataclass
class DataConfig:
    """Sources of tokens, and the tokenizer.

    A *source* is an indexed dataset or ``python-stdlib``. An indexed dataset is given as its path without ``.bin`` or
    ``.idx``. ``python-stdlib`` is a built-in corpus: source code and docstrings of the running Python.
    """

    train: list[str] = field(default_factory=lambda: ["python-stdlib"])
    """Sources of training tokens."""
    train_weights: list[float] | None = None
    """Relative weights of the training sources. If null, each source is weighted by its number of samples."""
    valid: list[str] = field(default_factory=list)
    """Sources of validation tokens. If empty, ``valid_fraction`` of each training source is used."""
    valid_weights: list[float] | None = None
    """Relative weights of the validation sources. If null, each source is weighted by its number of samples."""
    valid_fraction: float = 0.02
    """Share of each training source, at its end, that is used only for validation. No effect if ``valid`` is given."""
    tokenizer: str = "bytes"
    """``bytes`` (reads no file), ``huggingface`` or ``sentencepiece`` (both read ``tokenizer_file``), or ``gpt2``
    (reads ``vocab_file`` and ``merges_file``). ``sentencepiece`` needs the Python package ``sentencepiece``."""
    tokenizer_file: str | None = None
    """JSON file of the ``tokenizers`` library (``tokenizer=huggingface``) or ``.model`` file (``sentencepiece``)."""
    vocab_file: str | None = None
    """Vocabulary file (vocab.json) for ``tokenizer=gpt2``."""
    merges_file: str | None = None
    """Merges file (merges.txt) for ``tokenizer=gpt2``."""
    cache_dir: str = ".cache/data"
    """Folder for the index of the built-in corpus, which is written when the corpus is first used."""
    seed: int = 1234
    """Seed for the order of samples."""
    eod_mask_loss: bool = False
    """Compute no loss at end-of-document tokens, from which the model would predict the next document's first token."""
    reset_position_ids: bool = False
    """Number positions from 0 in each document. Only with ``model.position_embedding_type=learned_absolute``, because
    rotary position embeddings depend only on the distance between tokens."""
    reset_attention_mask: bool = False
    """Let a token attend only to tokens of its document. Needs the local layers (``training.transformer_impl``)."""
    mmap: bool = True
    """Map ``.bin`` files into memory instead of reading them."""


@dataclass
class OptimizerConfig:
    """AdamW with gradient clipping and a learning-rate schedule."""

    lr: float = 1e-3
    """Peak learning rate."""
    min_lr: float = 1e-4
    """Final learning rate of the schedule."""
    lr_warmup_iterations: int | None = None
    """Number of iterations of linear warm-up. null means a sixth of ``lr_decay_iterations``, but at most 10."""
    lr_warmup_init: float = 0.0
    """Learning rate of the first warm-up iteration. With 0, the first iteration changes no weight, as in Megatron."""
    lr_decay_style: str = "cosine"
    """Shape of the schedule: ``constant``, ``linear``, ``cosine``, ``inverse-square-root`` or ``WSD``."""
    lr_decay_iterations: int | None = None
    """Iteration at which the learning rate reaches ``min_lr``; null means ``training.train_iterations``."""
    lr_wsd_decay_iterations: int | None = None
    """Number of iterations of the final decay with ``lr_decay_style=WSD``."""
    lr_warmup_samples: int | None = None
    """Number of samples of linear warm-up if ``training.train_samples`` is given. null: a sixth of
    ``lr_decay_samples``, but at most 10 * ``training.global_batch_size``."""
    lr_decay_samples: int | None = None
    """Number of samples after which the learning rate reaches ``min_lr``. null means ``training.train_samples``."""
    lr_wsd_decay_samples: int | None = None
    """Number of samples of the final decay if ``lr_decay_style`` is ``WSD`` and ``training.train_samples`` is given."""
    lr_wsd_decay_style: str = "exponential"
    """Shape of the final decay of ``WSD``: ``exponential``, ``linear``, ``cosine`` or ``minus_sqrt``."""
    weight_decay: float = 0.1
    """Decoupled weight decay. It does not apply to biases and norms."""
    adam_beta1: float = 0.9
    """Decay rate of the first moment."""
    adam_beta2: float = 0.95
    """Decay rate of the second moment."""
    adam_eps: float = 1e-8
    """Term added to the square root of the second moment (epsilon)."""
    clip_grad: float = 1.0
    """Limit to which the global gradient norm is clipped; 0 turns clipping off."""
    update_backend: str = "torch"
    """Implementation of the AdamW update of quantized state (``precision.regime``): ``torch``, or a fused kernel of
    ``csrc/adamw``: ``cpp`` on CPUs, ``cuda`` on GPUs. A kernel is built at its first use and needs no temporary
    tensors. All implementations give the same bits. Without ``precision.regime`` only ``torch`` is possible."""

    def num_decay_iterations(self, train_iterations: int) -> int:
        """Return the iteration at which the learning rate reaches ``min_lr``."""
        return train_iterations if self.lr_decay_iterations is None else self.lr_decay_iterations

    def num_warmup_iterations(self, train_iterations: int) -> int:
        """Return the number of warm-up iterations of the learning rate."""
        if self.lr_warmup_iterations is not None:
            return self.lr_warmup_iterations
        return min(MAX_DEFAULT_WARMUP, self.num_decay_iterations(train_iterations) // 6)

    def num_samples(self, training: "TrainingConfig") -> tuple[int, int, int]:
        """Return the numbers of samples of warm-up, of the whole schedule, and of the final decay of ``WSD``."""
        batch, total = training.global_batch_size, training.train_samples
        if total is None:
            counts = (
                self.num_warmup_iterations(training.train_iterations),
                self.num_decay_iterations(training.train_iterations),
                self.lr_wsd_decay_iterations or 0,
            )
            return counts[0] * batch, counts[1] * batch, counts[2] * batch
        decay = total if self.lr_decay_samples is None else self.lr_decay_samples
        warmup = self.lr_warmup_samples
        warmup = min(MAX_DEFAULT_WARMUP * batch, decay // 6) if warmup is None else warmup
        return warmup, decay, self.lr_wsd_decay_samples or 0


@dataclass
class TrainingConfig:
    """Settings of training: length, batch sizes, evaluations, device, and actions after NaN losses and loss spikes."""

    train_iterations: int = 60
    """Number of iterations of the whole run. If ``train_samples`` is given, the number is computed from it."""
    train_samples: int | None = None
    """Number of samples of the whole run, rounded down to whole iterations. If given, the learning-rate schedule also
    counts samples (``optimizer.lr_decay_samples``, ``optimizer.lr_warmup_samples``)."""
    exit_at_iteration: int | None = None
    """Iteration after which this job stops although the run is not finished; a later job can resume the run. With null,
    the job continues to the end of the run. Learning-rate schedules do not depend on this key."""
    exit_interval_iterations: int | None = None
    """This job stops after the next iteration that is a multiple of this number; a later job can resume the run."""
    exit_after_minutes: float | None = None
    """Minutes from the start of the command after which this job stops as if it had received a signal: it finishes the
    iteration, saves, and ends with the exit code of an interrupted job. Only in mode ``local``."""
    micro_batch_size: int = 2
    """Number of samples of one microbatch on one data-parallel rank."""
    global_batch_size: int = 16
    """Number of samples per iteration, over all ranks. It does not depend on the number of ranks."""
    rampup_batch_size: list[int] | None = None
    """``[start, increment, samples]``: the batch size grows from ``start`` by ``increment`` per step, up to
    ``global_batch_size``. The steps divide the first ``samples`` samples of the run into equal parts. Needs
    ``train_samples``. null: constant."""
    seed: int = 1234
    """Seed of initial weights and dropout."""
    eval_interval_iterations: int = 30
    """Number of iterations between two evaluations; 0 turns evaluation off."""
    eval_iterations: int = 4
    """Number of batches of ``global_batch_size`` samples in one evaluation."""
    evaluate_only: bool = False
    """Load the state from which the job would start, evaluate it once on the validation data, report loss and
    perplexity, and end. Nothing is trained, saved or captured. The state comes from ``run.resume``, ``checkpoint.load``
    or ``checkpoint.load_weights``."""
    deterministic: bool = True
    """Use deterministic kernels and a fixed order of summation, so that runs with equal inputs are equal bit by bit."""
    num_threads: int = 1
    """Number of CPU threads per rank."""
    device: str = "auto"
    """``cpu``, ``cuda`` or ``auto`` (``cuda`` if the machine that starts the job has a GPU). With ``auto``, a dry run
    on a machine without a GPU checks both devices."""
    transformer_impl: str = "auto"
    """Implementation of transformer layers: ``local``, ``transformer_engine`` or ``auto`` (Transformer Engine on CUDA
    if it is fully installed, ``precision.fp8`` is null and ``data.reset_attention_mask`` is false, otherwise
    ``local``)."""
    non_finite_policy: str = "stop"
    """Action if a loss or gradient norm is NaN or infinite: ``stop`` the run, or ``skip`` the update. With ``fp16`` an
    overflow always skips the update and lowers the loss scale."""
    max_consecutive_skips: int = 10
    """Largest number of updates that may be skipped in a row; one more stops the run."""
    loss_spike_factor: float | None = None
    """Factor above which a loss is a spike: the loss exceeds this factor times the median of the last
    ``loss_spike_window`` committed losses. null turns the check for spikes off."""
    loss_spike_window: int = 50
    """Number of newest committed losses over which the median for ``loss_spike_factor`` is computed. The check for
    spikes starts when half of this number of losses are committed."""
    loss_spike_policy: str = "warn"
    """Action if a loss is a spike: ``warn``, ``skip`` the update, or ``stop`` the run."""
    frozen: str | None = None
    """Parameters that are not updated and keep their bits, also under weight decay: ``experts`` (all routed experts)
    or ``others`` (everything but the routed experts). null updates all parameters."""
    recompute_granularity: str | None = None
    """Recomputation of activations in the backward pass, as in Megatron: ``full`` or ``selective``; null for none."""
    distributed_timeout_seconds: float = 600.0
    """Timeout of collective operations."""
    digest_interval_iterations: int = 0
    """Number of iterations between two reports of a digest (checksum) of each rank's state; 0 never reports digests."""

    @property
    def evaluates(self) -> bool:
        """Return whether the job reads validation data."""
        return self.evaluate_only or self.eval_interval_iterations > 0


@dataclass
class LaunchConfig:
    """Launchers of nodes and ranks, numbers of nodes and ranks, and time limits for start and stop."""

    mode: str = "local"
    """Launcher of the ranks. ``local``: this command starts an agent for each node, and agents start the ranks.
    ``torchrun`` or ``srun``: the command torchrun or srun has started this process as a rank. If the environment
    variables of torchrun or srun are set, the corresponding mode is the default, and a note is printed."""
    node_launcher: str = "local"
    """Launcher of the agents in mode ``local``. ``local``: this command starts all agents on this machine. ``srun``:
    this command starts one agent on each node of its Slurm allocation. ``none``: Slurm starts agents as tasks of a job
    array, and each task connects to this command, also after Slurm has restarted the task. ``module:Class``: a launcher
    of another package (``control/launchers/base.py``)."""
    num_nodes: int = 1
    """Number of nodes with which the job starts."""
    ranks_per_node: int = 1
    """Number of ranks (processes) per node."""
    ranks_per_gpu: int = 1
    """Number of ranks of one machine that share a GPU, for tests on machines with few GPUs. Above 1, every rank gets
    its own NCCL host id, and NCCL uses only sockets."""
    master_port: int = 0
    """Port of the rendezvous store; 0 chooses a free port. Only in modes ``local`` and ``srun``."""
    forkserver_socket: str | None = None
    """Unix socket of a running fork server that starts the ranks; null starts a new one. Only in mode ``local``."""
    start_timeout_seconds: float = 300.0
    """Longest time from the start of the ranks until all ranks report that they have started."""
    stop_timeout_seconds: float = 20.0
    """Time that ranks have to end after a request to stop. Then they are killed. Only in mode ``local``."""


@dataclass
class NodesConfig:
    """Additional nodes: spares, nodes that join the running job, and lost nodes that are restarted."""

    max_nodes: int | None = None
    """Largest number of nodes, including spares. Nodes with numbers from ``launch.num_nodes`` up can join while the job
    runs. null means ``launch.num_nodes`` plus ``nodes.num_spare_nodes``."""
    num_spare_nodes: int = 0
    """Number of nodes started in addition to ``launch.num_nodes``. A spare waits until it replaces a lost node."""
    num_prebuilt_parts: int | None = None
    """Number of model parts that each spare builds in advance if ``recovery.keep_layout`` is true. One part contains
    the model, gradient buffers and optimizer for all ranks of a node. All nodes of one pipeline stage that have the
    same experts can use the same part. null: as many parts as fit in ``limits.host_memory_bytes``, or one part if that
    key is null. 0: a spare builds its part when it replaces a node."""
    join_window_seconds: float = 5.0
    """Time that the job waits after a node is ready to join. Further nodes that become ready in this time join together
    with this node."""
    max_node_restarts: int = 3
    """Largest number of consecutive failed restarts of a lost node. A restart fails if the node does not start, or ends
    within ten iterations."""
    restart_lost_nodes: bool = False
    """Whether a lost node is started again and joins the job. With ``launch.node_launcher=none`` the job waits for the
    node instead of starting it."""


@dataclass
class RecoveryConfig:
    """Kinds of recovery that the job may use when ranks or nodes fail, and limits of these recoveries."""

    strategies: list[str] | None = None
    """Recovery strategies that the job may use by itself: ``living_state``, ``localized_replay``, ``rollback`` and
    ``checkpoint``. Their order has no meaning. The job prefers strategies that lose no committed iteration; of these it
    uses the one with the shortest predicted time. null allows all strategies that the other keys make possible. When a
    user starts the job again (``run.resume``), any saved state can be used."""
    max_restarts: int = 0
    """Largest number of times that all ranks are restarted after a rank has failed. Progress resets the count to 0. The
    ranks continue from the newest window or checkpoint. Only in mode ``local``."""
    min_nodes: int | None = None
    """Smallest number of nodes with which training continues after nodes are lost. When a rank dies, its node is
    removed, and ranks on the other nodes continue without a restart. With ``recovery.keep_layout`` this happens only if
    no other node can replace the lost node. null: the job needs all nodes."""
    keep_layout: bool = False
    """Whether the job keeps its parallel layout when nodes are lost. A spare node, or the lost node after a restart,
    replaces the lost node. The new ranks receive their state from living ranks. If this is impossible, only stages that
    lost a rank replay. With ``recovery.keep_processes=false`` all ranks start again instead. If no node can replace the
    lost node, the job ends, or continues on fewer nodes as ``recovery.min_nodes`` allows."""
    keep_processes: bool | None = None
    """Whether ranks on the remaining nodes continue in their processes after a loss. With false, which needs
    ``recovery.keep_layout=true``, all ranks start again from the newest window as soon as other nodes have replaced the
    lost nodes. null: true on CPUs; false on CUDA, where NCCL communicators of a living process cannot be aborted."""
    position_timeout_seconds: float = 10.0
    """Time limit for ranks to report their position (newest iterations) after a loss. It begins when ranks are ordered
    to stop. If a rank has not reported by then, but another rank has, its node also counts as lost. Usually ranks
    report much earlier, because they abort a collective after half a second. The limit must exceed the time that a rank
    computes between two collectives."""
    reconfigure_timeout_seconds: float = 60.0
    """Longest wait after a loss until all remaining ranks have reported their positions (progress); also the longest
    wait for the new process group."""

    def may_use(self, strategy: str) -> bool:
        """Return whether ``recovery.strategies`` allows the job to use this strategy without a user's restart."""
        return self.strategies is None or strategy in self.strategies


@dataclass
class TopologyConfig:
    """Failure domains of the nodes, and the network between nodes. Nodes of one domain are lost together."""

    failure_domains: list[str] = field(default_factory=list)
    """Name of each node's failure domain (rack, switch), by node number. If empty, every node is its own domain."""
    failure_domain_source: str = "listed"
    """Source of the names of failure domains. ``listed``: ``topology.failure_domains``. ``slurm_topology``: the
    topology of the Slurm cluster, read at the start; the domain of a node is its leaf switch. This needs
    ``launch.node_launcher=srun``."""
    link_bytes_per_second: float | None = None
    """Bytes per second that one rank can send to another node. If given, transfer times are predicted with it."""


@dataclass
class LimitsConfig:
    """Memory of a GPU and of a node. A job whose plan needs more is refused."""

    gpu_memory_bytes: int | None = None
    """Memory of one GPU. null: a job on CUDA queries ``nvidia-smi``, and a dry run checks no GPU memory."""
    host_memory_bytes: int | None = None
    """Host memory of one node. In mode ``local``, null means the memory of this machine."""


@dataclass
class ControlConfig:
    """Address and encryption of the control channel, over which launcher, controller and agents communicate."""

    interface: str = "127.0.0.1"
    """Address on which the control channel listens; must not mean all interfaces. With ``launch.node_launcher=srun`` or
    ``none`` it may also be the name of a network interface of the batch host. Only in mode ``local``."""
    tls_dir: str | None = None
    """Folder with ``ca.pem``, ``cert.pem`` and ``key.pem``. The control channel is then encrypted with TLS, and both
    sides must present a certificate signed by the CA of ``ca.pem``. null sends plain text. Only in mode ``local``."""


@dataclass
class DetectorConfig:
    """Timeouts for unresponsive ranks and nodes and for a job without progress. Only in mode ``local``."""

    heartbeat_interval_seconds: float = 1.0
    """Seconds between two heartbeats of a rank or of a node's agent."""
    heartbeat_timeout_seconds: float = 10.0
    """Longest time without a heartbeat. After this time, a rank is killed, and an agent's node counts as lost."""
    vanished_seconds: float | None = 2.0
    """Longest time without an answer from the operating system of an agent's machine. After this time, the machine
    counts as vanished (no power or no network), and its node as lost. An operating system also answers if the machine
    is overloaded or processes are suspended. Must be at least 1 and below ``detector.heartbeat_timeout_seconds``. With
    null, only missing heartbeats reveal a vanished machine."""
    lost_controller_seconds: float = 60.0
    """Longest time without an answer from the controller. After this time, a node ends its ranks, because the node is
    disconnected and may have been replaced. Must be above ``detector.heartbeat_timeout_seconds``."""
    hang_seconds: float | None = 600.0
    """Longest time in which no rank makes progress. After this time, the ranks that are furthest behind are killed, or
    all ranks if all are at the same point. null never kills ranks for this reason."""
    hang_iterations: float | None = 10.0
    """Longest time without progress while ranks train, as a multiple of the median duration of an iteration. The limit
    is at least ``detector.min_hang_seconds``. It is used if it is shorter than ``detector.hang_seconds``, but not
    during the first iterations of a membership, evaluations and saves. null: only ``detector.hang_seconds``."""
    min_hang_seconds: float = 30.0
    """Smallest time limit that ``detector.hang_iterations`` can give; shorter limits are raised to this value."""


@dataclass
class SnapshotConfig:
    """Capture of training state (snapshots), and copies of it on other nodes and storage. Off without a ``policy``."""

    policy: dict[str, Any] | None = None
    """Policy that decides what is captured. ``_target_`` names its class; other entries are its fields. null: none."""
    num_peer_copies: int = 2
    """Number of copies (r) of every window (snapshot) in the memory of nodes in other failure domains. 0: no copies."""
    bandwidth_bytes_per_second: float | None = None
    """Bytes that one rank can capture (copy to host memory) per second. null measures the rate at the start."""
    iteration_seconds: float | None = None
    """Duration of an iteration. The plan captures one slice of a window per iteration. null measures the duration."""
    host_memory_limit_bytes: int | None = None
    """Largest host memory that one node may use for windows and for copies of other nodes' windows, checked before the
    start. null sets no limit."""
    persist_interval_windows: int = 0
    """Number n: write every n-th committed window to storage. With 0, write only the window before a requested stop."""
    storage_bandwidth_bytes_per_second: float | None = None
    """Bytes that one rank can write to storage per second. If given, and if windows leave out experts, each file has as
    many experts as can be written before the next file is due (MoC-System, section 5.3). With null,
    ``snapshot.policy.num_persisted_experts`` gives the number of experts."""
    persist_url: str | None = None
    """Path or fsspec URL of the folder for windows on storage; each run has a subfolder with its name. null means
    ``windows`` in the run's folder."""
    keep_persisted: int = 2
    """Number of newest complete windows to keep on storage; 0 keeps all windows."""
    outlive_job_seconds: int = 0
    """Seconds for which snapshot servers continue to run after a job has ended, for any reason, without finishing the
    run. A job that resumes the run on the same nodes (``run.resume``) takes over these servers and continues from
    windows in their memory. The memory of a server does not grow during this time. After this time a server ends. At
    most 604800 (one week). 0 ends servers with the job. Must be 0 with ``launch.node_launcher=srun``, because Slurm
    ends all processes of a step."""
    repay_capacity_share: float | None = None
    """Additional capacity of an expert that lost tokens in a recovery, as a share of its capacity (MoEtion uses 0.1).
    The expert uses only capacity that other experts leave unused, until it has processed as many additional tokens as
    it lost. Needs ``model.moe_expert_capacity_factor``. null never exceeds a capacity."""
    replan_interval_windows: int = 4
    """Number of windows after which the snapshot plan is checked against measured bandwidth, iteration time and expert
    loads, and is replaced if necessary. 0 keeps the first plan."""
    skip_frozen_gradients: bool = True
    """Skip weight gradients of frozen (not yet fully loaded) operators in a replay. Use false only for measurements."""
    copy_in_bubbles: bool = False
    """Copy slices of windows preferably while a rank waits for another pipeline stage (MoEtion, section 5.3). Windows
    have the same bytes and are complete at the same time as without this key. Only on CPUs, with PP above 1."""

    @property
    def windows_per_file(self) -> int:
        """Every how many windows one is written to storage; 1 if windows are written only before a stop."""
        return max(1, self.persist_interval_windows)


@dataclass
class UpstreamLogConfig:
    """Log of activations and gradients sent between pipeline stages, used with ``recovery.keep_layout``."""

    commit_lag_iterations: int = 4
    """Largest expected number of iterations from the last slice of a window to the commit of this window. The log has
    space for two windows and twice this number of iterations."""
    memory_limit_bytes: int | None = None
    """Largest memory that the logs of one node may use, checked before memory is allocated. null sets no limit."""


@dataclass
class RunConfig:
    """Name and folder of a run, and whether an existing run is resumed."""

    dir: str = "runs"
    """Folder that contains the folders of all runs."""
    name: str | None = None
    """Name of the run and of its folder in ``run.dir``. null: the model's name and a number (``moe_tiny-001``)."""
    resume: str = "never"
    """``never``: the run must not exist yet. ``must``: the run must exist and have saved state, from which it
    continues. ``auto``: the run continues from its newest usable state, or starts at iteration 0 if it has no saved
    state. If the run exists, keys that are not given have the values of its newest job (``config.yaml``)."""
    allow_change: list[str] = field(default_factory=list)
    """Keys of data, model, optimizer or schedule that a resumed run may change, e.g. ``[optimizer.lr]``. A resumed run
    continues with the configuration of its newest job; other keys may be changed without being listed here."""
    start_over: bool = False
    """Allow ``run.resume=auto`` to start at iteration 0 if the run has saved state, but none of it is usable. If
    false, such a job is refused. The error message lists all saved states and why each is not usable."""


@dataclass
class TestingConfig:
    """Injected faults and scheduled membership changes, for tests."""

    failpoints: list[str] = field(default_factory=list)
    """Faults that are injected, e.g. ``kill(rank=1,at_iteration=7,phase="backward")`` (docs/launch.md, "Injecting
    faults")."""
    membership_schedule: list[str] = field(default_factory=list)
    """Membership changes before given iterations, e.g. ``lose(nodes=[2],before_iteration=5)``,
    ``join(nodes=[2],before_iteration=9)`` or both in ``change(lose=[1],join=[2],before_iteration=12)``. A node in both
    lists is restarted. Tests compare a run that lost nodes with a run that has the same changes in its schedule. The
    event ``membership_changed`` contains the entries with which another run repeats the change (docs/elastic.md)."""


@dataclass
class JobConfig:
    """Configuration of a job. Each group of keys is a field with the group's name."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    nodes: NodesConfig = field(default_factory=NodesConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    detector: DetectorConfig = field(default_factory=DetectorConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    snapshot: SnapshotConfig = field(default_factory=SnapshotConfig)
    upstream_log: UpstreamLogConfig = field(default_factory=UpstreamLogConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    run: RunConfig = field(default_factory=RunConfig)
    testing: TestingConfig = field(default_factory=TestingConfig)
    dry_run: bool = False
    """Check the configuration, print the plan and exit. Starts no ranks and needs no GPU."""
    dry_run_format: str = "table"
    """Format of the plan that ``dry_run`` prints: ``table`` or ``json``."""

    @property
    def fewest_nodes(self) -> int:
        """Return the smallest number of nodes with which the job continues (``recovery.min_nodes``)."""
        return self.launch.num_nodes if self.recovery.min_nodes is None else self.recovery.min_nodes

    @property
    def most_nodes(self) -> int:
        """Return the largest number of nodes, including spares. All node numbers are smaller than this value."""
        most = self.nodes.max_nodes
        return self.launch.num_nodes + self.nodes.num_spare_nodes if most is None else most

    @property
    def most_members(self) -> int:
        """Return the largest number of nodes that train at the same time."""
        return self.most_nodes - self.nodes.num_spare_nodes

    @property
    def member_domains(self) -> list[str]:
        """Return the failure domain of each node with which the job starts, without spares."""
        num_nodes = self.launch.num_nodes
        return self.topology.failure_domains[:num_nodes] or [f"node{node}" for node in range(num_nodes)]

    @property
    def rank_places(self) -> tuple[int, ...]:
        """Return for each rank the index of its node in ``member_domains``, which lists the nodes with which the job
        starts."""
        launch = self.launch
        return tuple(node for node in range(launch.num_nodes) for _ in range(launch.ranks_per_node))

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return len(self.rank_places)

    @property
    def rank_domains(self) -> tuple[str, ...]:
        """Return the failure domain of each rank."""
        names = self.member_domains
        return tuple(names[place] for place in self.rank_places)

    @property
    def may_change_nodes(self) -> bool:
        """Return whether the job continues when nodes are lost, leave or join. True even if all ranks must restart."""
        return self.recovery.keep_layout or self.fewest_nodes < self.most_nodes

    @property
    def keeps_processes(self) -> bool:
        """Return whether ranks may continue in their processes after a loss: ``recovery.keep_processes`` and
        ``recovery.strategies`` allow it. ``training.device=auto`` counts as ``cpu``."""
        keeps, may_use = self.recovery.keep_processes, self.recovery.may_use
        is_used = may_use("living_state") or (self.recovery.keep_layout and may_use("localized_replay"))
        return is_used and (self.training.device != "cuda" if keeps is None else keeps)

    @property
    def may_lose_nodes(self) -> bool:
        """Return whether the job continues when nodes are lost, leave or join, and the remaining ranks keep running."""
        return self.may_change_nodes and self.keeps_processes

    @property
    def replays_stages(self) -> bool:
        """Return whether, after a loss, pipeline stages that lost a rank replay and all other stages do not."""
        return self.recovery.keep_layout and self.keeps_processes

    @property
    def may_change_layout(self) -> bool:
        """Return whether the number of lanes (model replicas) may fall or rise again while the job runs, because of a
        loss or a request. With ``recovery.keep_layout`` this is possible only if ``recovery.min_nodes`` is below
        ``launch.num_nodes``."""
        if self.recovery.keep_layout:
            return self.fewest_nodes < self.launch.num_nodes
        return self.may_change_nodes

    @property
    def why_nodes_change(self) -> str | None:
        """Return the setting (``key=value``) that makes ``may_change_nodes`` true; None if nodes may not change."""
        if not self.may_change_nodes:
            return None
        if self.recovery.keep_layout:
            return "recovery.keep_layout=true"
        if self.fewest_nodes < self.launch.num_nodes:
            return f"recovery.min_nodes={self.recovery.min_nodes}"
        if self.nodes.max_nodes is not None:
            return f"nodes.max_nodes={self.nodes.max_nodes}"
        return f"nodes.num_spare_nodes={self.nodes.num_spare_nodes}"
