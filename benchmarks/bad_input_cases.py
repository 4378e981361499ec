"""Generates the cases of the claim ``bad-input-early``: commands that cannot work, each with its expected errors."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import pretrain_moe
from benchmarks.bad_inputs import TORCHRUN
from megatron_ft.config.docs import key_docs
from megatron_ft.config.identity import settings_of
from megatron_ft.corpus.indexed import IndexedWriter, bin_path, idx_path
from megatron_ft.corpus.samples import resolve_vocab_size
from megatron_ft.snapshot.storage.checkpoints import directory_name
from megatron_ft.snapshot.storage.manifest import MANIFEST_NAME, Manifest

CONFIG, DATA, CHECKPOINT = 2, 3, 5
CPU = "training.device=cpu"
JOB = ("model=moe_micro", CPU, "data.train=[corpus]")
"""Overrides that all cases begin with. The job could start with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A command line, and the texts that its errors contain: one tuple for each error, in their order."""

    kind: str
    words: tuple[str, ...]
    errors: tuple[tuple[str, ...], ...]
    exit_code: int = CONFIG
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables."""
    begins_with_job: bool = True

    @property
    def name(self) -> str:
        """Return the command line as reports show it."""
        return " ".join(self.words)

    @property
    def command(self) -> tuple[str, ...]:
        """Return the whole command line. It has a run name, so that a run that was created can be found."""
        named = () if any(word.startswith("run.name=") for word in self.words) else ("run.name=new",)
        return (*JOB, *named, *self.words) if self.begins_with_job else self.words


def one(kind: str, *words: str, says: Sequence[str], exit_code: int = CONFIG) -> Case:
    """Return a case with one error, which contains the texts of ``says``."""
    return Case(kind=kind, words=words, errors=(tuple(says),), exit_code=exit_code)


def several(*words: str, says: Sequence[Sequence[str]], exit_code: int = CONFIG) -> Case:
    """Return a case of several independent errors."""
    return Case(kind="several errors", words=words, errors=tuple(map(tuple, says)), exit_code=exit_code)


def all_cases(folder: Path) -> list[Case]:
    """Write the files that the cases need into ``folder``, the working directory, and return all cases."""
    write_dataset(folder / "corpus")
    return [
        *review_cases(folder),
        *wrong_types(),
        *out_of_range(),
        *unknown_words(),
        *unknown_keys(),
        *indivisible(),
        *incompatible(),
        *wrong_files(folder),
        *wrong_tokenizers(folder),
        *wrong_environments(folder),
        *wrong_checkpoints(folder),
        *combinations(),
    ]


def write_dataset(prefix: Path, *, num_tokens: int = 40_000) -> None:
    """Write a dataset of bytes."""
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        writer.add_document(np.arange(num_tokens, dtype=np.uint16) % 256)


def review_cases(folder: Path) -> list[Case]:
    """Return mistakes of new users. Earlier versions refused them too late, or gave wrong or unsafe advice."""
    experiments = folder / "conf" / "experiment"
    experiments.mkdir(parents=True)
    (experiments / "mine.yaml").write_text("model:\n  num_layers: 2\n")
    (experiments / "broken.yaml").write_text("# @package _global_\nmodel: {num_layers: 2\n")
    slurm = ("experiment=mixtral_slurm", "training.device=cuda", "dry_run=true")
    kind = "review"
    return [
        one(kind, "checkpoint.load=/nope", says=["checkpoint.load=/nope", "existing directory"], exit_code=CHECKPOINT),
        one(kind, "training.device=cuda", says=["training.device=cuda", "no usable GPU"]),
        one(
            kind,
            "placement=overlap_search",
            "launch.num_nodes=2",
            "placement.dispatch_backend=cuda",
            says=["placement.dispatch_backend=cuda", "must be auto, reference or cpp"],
        ),
        one(kind, "--config-dir=conf", "experiment=mine", says=["experiment=mine", "# @package _global_"]),
        one(kind, "--config-dir=conf", "experiment=broken", says=["broken.yaml: line 3 must be valid YAML"]),
        Case(
            kind=kind,
            words=("data=huggingface", "data.tokenizer_file=/nope.json", "data.train=[]"),
            errors=(("data.train=[]", "at least one source"), ("data.tokenizer_file=/nope.json", "existing file")),
        ),
        one(kind, "launch=srun", says=["launch.mode=srun", "must be local", "not started by srun"]),
        one(kind, "placement=overlap_search", says=["placement.min_replicas=2", "use more nodes than"]),
        one(kind, "data.train=path", says=["data.train=path", "write data.train=[path]"]),
        one(kind, "placement.algorithm=foo", says=["placement.algorithm=foo", "placement=<option>"]),
        one(kind, "snapshot.policy=sparse", says=["snapshot.policy=sparse", "snapshot=<option>"]),
        one(kind, "training.train_iterations=1e3", says=["write training.train_iterations=1000"]),
        one(kind, "training.train_iterations=60.0", says=["write training.train_iterations=60"]),
        one(kind, "nodes.restart_lost_nodes=true", says=["nodes.restart_lost_nodes=true", "set recovery.min_nodes"]),
        one(kind, "nodes.num_spare_nodes=1", says=["nodes.num_spare_nodes=1", "set recovery.keep_layout=true"]),
        one(kind, "recovery.keep_layout=true", says=["set nodes.num_spare_nodes above 0"]),
        one(kind, "parallel.overlap_param_gather=true", says=["parallel.overlap_param_gather=true", "must be false"]),
        one(kind, *slurm, "recovery.min_nodes=6", says=["recovery.min_nodes=6 also requires", "training.device=cuda"]),
        one(
            kind,
            *("dry_run=true", "model=mixtral_8x7b", "training.device=cuda", "limits.gpu_memory_bytes=80000000000"),
            *("training.recompute_granularity=full", "training.micro_batch_size=1", "data.train=[python-stdlib]"),
            says=["GiB instead of 74.5 GiB", "use more ranks with a larger parallel.pipeline"],
        ),
        one(kind, "run.name=gone", "run.resume=must", says=["run.name=gone", "must be a folder in"]),
    ]


def wrong_types() -> list[Case]:
    """Return a command for each group of keys. It gives a word to every number and boolean of the group, and a number
    to every list. Each of these values is an independent error."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for doc in key_docs():
        wrong = {"int": "many", "float": "fast", "bool": "perhaps", "list": "3"}.get(doc.type.partition(" ")[0])
        if wrong is not None and "." in doc.key:
            word = f"{doc.key}={wrong}"
            groups.setdefault(doc.key.partition(".")[0], []).append((word, f"{word}: must be of type {doc.type}"))
    return [
        Case(kind="type", words=tuple(word for word, _ in wrong), errors=tuple((text,) for _, text in wrong))
        for wrong in groups.values()
    ]


AT_LEAST_ONE = (
    *("model.num_layers", "model.hidden_size", "model.num_attention_heads", "model.num_query_groups"),
    *("model.kv_channels", "model.seq_length", "model.max_position_embeddings", "model.vocab_size"),
    *("model.make_vocab_size_divisible_by", "model.ffn_hidden_size", "model.rotary_base", "model.num_moe_experts"),
    *("model.moe_layer_freq", "model.moe_ffn_hidden_size", "model.moe_shared_expert_intermediate_size"),
    *("parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"),
    *("parallel.expert_model_parallel_size", "parallel.expert_tensor_parallel_size"),
    *("parallel.context_parallel_size", "training.train_iterations", "training.micro_batch_size"),
    *("training.global_batch_size", "training.eval_iterations", "training.num_threads", "training.exit_at_iteration"),
    *("training.max_consecutive_skips", "optimizer.lr_decay_iterations", "precision.loss_scale_window"),
    *("precision.hysteresis", "launch.num_nodes", "launch.ranks_per_node", "launch.ranks_per_gpu"),
    *("limits.gpu_memory_bytes", "limits.host_memory_bytes", "snapshot.host_memory_limit_bytes"),
    *("upstream_log.memory_limit_bytes", "telemetry.log_interval_iterations"),
)
AT_LEAST_ZERO = (
    *("model.moe_first_dense_layers", "model.moe_aux_loss_coeff", "model.moe_z_loss_coeff"),
    *("model.moe_router_bias_update_rate", "optimizer.min_lr", "optimizer.lr_warmup_init", "optimizer.weight_decay"),
    *("optimizer.clip_grad", "optimizer.lr_warmup_iterations", "training.eval_interval_iterations"),
    *("training.digest_interval_iterations", "checkpoint.save_interval_iterations", "checkpoint.keep_last"),
    *("checkpoint.keep_every_iterations", "snapshot.num_peer_copies", "snapshot.persist_interval_windows"),
    *("snapshot.keep_persisted", "snapshot.replan_interval_windows", "upstream_log.commit_lag_iterations"),
    *("nodes.num_spare_nodes", "nodes.num_prebuilt_parts", "nodes.join_window_seconds", "nodes.max_node_restarts"),
    *("recovery.max_restarts", "telemetry.expert_load_interval_iterations"),
)
ABOVE_ZERO = (
    *("model.layernorm_epsilon", "model.init_method_std", "model.moe_router_topk_scaling_factor"),
    *("model.moe_expert_capacity_factor", "optimizer.lr", "optimizer.adam_eps", "precision.initial_loss_scale"),
    *("precision.min_loss_scale", "training.distributed_timeout_seconds", "launch.start_timeout_seconds"),
    *("launch.stop_timeout_seconds", "detector.heartbeat_interval_seconds", "detector.hang_seconds"),
    *("detector.hang_iterations", "detector.min_hang_seconds", "recovery.position_timeout_seconds"),
    *("recovery.reconfigure_timeout_seconds", "topology.link_bytes_per_second"),
    *("snapshot.bandwidth_bytes_per_second", "snapshot.iteration_seconds", "telemetry.alert_stall_share"),
)


def out_of_range() -> list[Case]:
    """Return commands with values beyond the bounds of their keys."""
    cases = [one("range", f"{key}=0", says=[f"{key}=0: must be at least 1"]) for key in AT_LEAST_ONE]
    cases += [
        one("range", f"{key}=-1", says=[f"{key}=-1", "must be at least 0"])
        for key in AT_LEAST_ZERO
        if key != "nodes.num_prebuilt_parts"
    ]
    cases += [one("range", f"{key}=0", says=[f"{key}=0", "must be greater than 0"]) for key in ABOVE_ZERO]
    for key in ("model.hidden_dropout", "model.attention_dropout", "optimizer.adam_beta1", "optimizer.adam_beta2"):
        cases.append(one("range", f"{key}=1.5", says=[f"{key}=1.5", "[0, 1)"]))
    for key in ("optimizer.lr", "model.layernorm_epsilon", "detector.hang_seconds", "model.rotary_percent"):
        for value in ("nan", "inf"):
            cases.append(one("range", f"{key}={value}", says=[f"{key}={value}: must be a finite number"]))
    for key, value, says in (
        ("model.rotary_percent", "1.5", "at most 1"),
        ("data.valid_fraction", "1.0", "[0, 1)"),
        ("data.seed", "-1", "must be in 0.."),
        ("training.seed", "4294967296", "must be in 0.."),
        ("launch.master_port", "70000", "0..65535"),
        ("training.loss_spike_window", "1", "at least 2"),
        ("training.loss_spike_factor", "1.0", "greater than 1"),
        ("detector.heartbeat_timeout_seconds", "1.5", "at least twice"),
        ("detector.lost_controller_seconds", "5.0", "above detector.heartbeat_timeout_seconds"),
        ("telemetry.alert_free_disk_share", "2.0", "at most 1"),
        ("telemetry.alert_windows_behind", "0.5", "greater than 1"),
        ("snapshot.outlive_job_seconds", "99999999", "must be from 0 to"),
        ("model.moe_router_topk", "99", "must be from 1 to model.num_moe_experts=8"),
    ):
        cases.append(one("range", f"{key}={value}", says=[f"{key}={value}", says]))
    return cases


CHOICES = (
    *("model.position_embedding_type", "model.normalization", "model.activation", "model.router"),
    *("model.moe_router_load_balancing_type", "model.moe_router_score_function", "model.moe_token_drop_policy"),
    *("parallel.device_backend", "placement.dispatch_backend", "placement.shares", "data.tokenizer"),
    *("optimizer.lr_decay_style", "optimizer.lr_wsd_decay_style", "precision.params_dtype", "precision.fp8"),
    *("precision.fp8_recipe", "training.device", "training.transformer_impl", "training.non_finite_policy"),
    *("training.loss_spike_policy", "training.frozen", "training.recompute_granularity", "launch.mode"),
    *("launch.node_launcher", "topology.failure_domain_source", "telemetry.progress", "telemetry.wandb"),
    *("run.resume", "dry_run_format"),
)


def unknown_words() -> list[Case]:
    """Return commands with words that a key does not accept, and with options that a group does not have."""
    cases = [one("word", f"{key}=nonsense", says=[f"{key}=nonsense: must be one of"]) for key in CHOICES]
    for group in ("model", "data", "launch", "placement", "snapshot", "recovery", "precision", "experiment"):
        cases.append(one("word", f"{group}=nonsense", says=[f"{group}=nonsense: must be one of"]))
    return cases


def unknown_keys() -> list[Case]:
    """Return commands with misspelled keys. The error names the right key."""
    cases = []
    for key in (
        *(
            "model.num_layers",
            "model.num_moe_experts",
            "parallel.pipeline_model_parallel_size",
            "optimizer.lr_decay_style",
        ),
        *("training.train_iterations", "checkpoint.save_interval_iterations", "snapshot.num_peer_copies"),
        *("detector.heartbeat_interval_seconds", "telemetry.wandb_project", "recovery.max_restarts"),
    ):
        wrong = key[:-1]
        cases.append(one("key", f"{wrong}=1", says=[f"{wrong}=1: is not a known key", key]))
    for old, new in (
        ("launch.min_nodes", "recovery.min_nodes"),
        ("launch.gpu_memory_bytes", "limits.gpu_memory_bytes"),
    ):
        cases.append(one("key", f"{old}=1", says=[f"{old}=1: is now {new}"]))
    cases += [
        one("key", "~model.num_layers", says=["~model.num_layers", "must not be deleted"]),
        one("key", "model.num_layers=2,4", says=["must be a single value", "--multirun"]),
        one("key", "optimizer.lr=${nowhere}", says=["must refer only to keys that exist"]),
        one("key", "--num-layers=3", says=["model.num_layers=3"]),
        one("key", "--no-such-flag", says=["--no-such-flag"]),
    ]
    return cases


TWO, THREE, FOUR = (f"launch.ranks_per_node={number}" for number in (2, 3, 4))
TP2, PP3, EP3 = (
    "parallel.tensor_model_parallel_size=2",
    "parallel.pipeline_model_parallel_size=3",
    "parallel.expert_model_parallel_size=3",
)


def indivisible() -> list[Case]:
    """Return commands with sizes of which one must divide the other, but does not."""
    kind = "divisibility"
    return [
        one(kind, THREE, TP2, says=["launch.num_nodes * launch.ranks_per_node=3", "multiple of TP * PP * CP"]),
        one(kind, THREE, PP3, says=["model.num_layers=4", "multiple of PP * VPP"]),
        one(kind, THREE, EP3, says=["parallel.expert_model_parallel_size=3", "must divide model.num_moe_experts=8"]),
        one(kind, TWO, "parallel.expert_model_parallel_size=4", says=["the number of ranks of a pipeline stage"]),
        one(kind, TWO, TP2, "model.num_query_groups=1", says=["model.num_query_groups=1", "multiple of"]),
        one(kind, TWO, TP2, "model.ffn_hidden_size=31", says=["model.ffn_hidden_size=31", "multiple of"]),
        one(kind, TWO, TP2, "model.seq_length=33", says=["model.seq_length=33", "multiple of"]),
        one(kind, TWO, TP2, "model.make_vocab_size_divisible_by=33", says=["make_vocab_size_divisible_by=33"]),
        one(kind, "model.num_attention_heads=3", says=["model.num_attention_heads=3", "must divide model.hidden_size"]),
        one(kind, "model.num_query_groups=3", says=["model.num_query_groups=3", "must divide"]),
        one(
            kind, "training.global_batch_size=15", "training.micro_batch_size=2", says=["training.global_batch_size=15"]
        ),
        one(
            kind,
            "model.moe_router_num_groups=3",
            "model.moe_router_group_topk=1",
            says=["model.moe_router_num_groups=3", "must divide model.num_moe_experts=8"],
        ),
        one(
            kind,
            "checkpoint.save_interval_iterations=4",
            "checkpoint.keep_every_iterations=6",
            says=["checkpoint.keep_every_iterations=6", "multiple of checkpoint.save_interval_iterations=4"],
        ),
    ]


def incompatible() -> list[Case]:
    """Return commands with two values that exclude each other."""
    kind = "pair"
    table: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
        (("model.moe_router_topk=1",), ("model.moe_router_pre_softmax=false", "must be true")),
        (("model.moe_router_enable_expert_bias=true",), ("must be false unless",)),
        (("model.moe_shared_expert_gate=true",), ("must be false without",)),
        (("model.moe_pad_expert_input_to_capacity=true",), ("must be false without",)),
        (("model.rope_type=yarn",), ("model.rope_type=yarn", "must be null without")),
        (("model.mscale=1.0",), ("model.mscale=1.0", "must be null without")),
        (("model.router_trace_start=3",), ("must be 0 unless model.router=trace",)),
        (("model.router=trace",), ("model.router_trace_file=null", "must be given")),
        (("model.max_position_embeddings=8",), ("must not exceed model.max_position_embeddings=8",)),
        (("model.num_moe_experts=null",), ("model.moe_ffn_hidden_size=", "must be null in a dense model")),
        (("model.moe_router_load_balancing_type=sinkhorn",), ("model.moe_aux_loss_coeff=", "must be 0")),
        (("precision.loss_scale=2.0",), ("precision.loss_scale=2.0", "only fp16 scales the loss")),
        (("precision.min_loss_scale=99999999",), ("precision.min_loss_scale", "must not exceed")),
        (
            ("precision=fp8_tensorwise", "precision.params_dtype=fp16"),
            ("precision.params_dtype=fp16", "with precision.fp8"),
        ),
        (("optimizer.min_lr=1.0",), ("optimizer.min_lr=1.0", "must not exceed optimizer.lr")),
        (("optimizer.lr_warmup_iterations=60",), ("must be less than training.train_iterations=60",)),
        (("optimizer.lr_decay_style=WSD",), ("optimizer.lr_wsd_decay_iterations=null", "must be from 1 to ")),
        (("training.transformer_impl=transformer_engine",), ("must be local or auto with training.device=cpu",)),
        (("training.evaluate_only=true",), ("needs state to evaluate",)),
        (("parallel.virtual_pipeline_model_parallel_size=2",), ("must be null with",)),
        (("parallel.device_backend=nccl",), ("must be auto or gloo with training.device=cpu",)),
        ((TWO, "parallel.context_parallel_size=2"), ("must be 1 with training.device=cpu", "Transformer Engine")),
        (("placement.loads_file=x.json",), ("must not be set without placement.algorithm",)),
        (("placement.state_copies=1",), ("placement.state_copies=1", "must be null unless")),
        (
            ("placement=overlap_search", "launch.num_nodes=2", TWO, "parallel.expert_model_parallel_size=2"),
            ("parallel.expert_model_parallel_size=2", "must be 1 if placement.algorithm is given"),
        ),
        (("snapshot=sparse_window", "snapshot.num_peer_copies=5"), ("must be below the number of failure domains",)),
        (("snapshot=sparse_window", "snapshot.num_peer_copies=0", "snapshot.policy.foo=3"), ("snapshot.policy.foo=3",)),
        (("snapshot.outlive_job_seconds=5",), ("must be 0 with snapshot.policy=null",)),
        (("recovery=rollback",), ("snapshot.policy=null", "must be given")),
        (("recovery=living_state",), ("recovery.strategies=[living_state]",)),
        (("recovery.strategies=[chekpoint]",), ("must be one of", "checkpoint")),
        (("recovery.min_nodes=3",), ("recovery.min_nodes=3", "1..launch.num_nodes=1")),
        (("nodes.max_nodes=1", "launch.num_nodes=2"), ("nodes.max_nodes=1", "at least 2")),
        (("topology.failure_domains=[a,b]",), ("topology.failure_domains", "must have 1 names")),
        (("topology.failure_domain_source=slurm_topology",), ("must be 'listed'",)),
        (
            ("launch.node_launcher=srun", "launch.mode=torchrun", "dry_run=true"),
            ("launch.mode=torchrun", "must be local"),
        ),
        (("launch=torchrun", "recovery.max_restarts=1", "dry_run=true"), ("recovery.max_restarts=1", "must be 0")),
        (("run.start_over=true",), ("run.start_over=true", "must be false")),
        (("data.train_weights=[1,2]",), ("data.train_weights", "as many weights")),
        (("data.tokenizer_file=x",), ("data.tokenizer_file=x", "must be null with data.tokenizer=bytes")),
        (("data.valid_weights=[1]",), ("data.valid_weights", "weights")),
        (("testing.failpoints=['kill(rank=5,phase=\"forward\")']",), ("must name a rank in 0..0",)),
        (("testing.membership_schedule=['lose(nodes=[3],before_iteration=2)']",), ("must name nodes in 0..0",)),
        (("run.name=../up",), ("run.name=../up", "must be 1 to 100 letters")),
        (("control.interface=0.0.0.0",), ("must not mean all network interfaces",)),
    )
    return [one(kind, *words, says=says) for words, says in table]


def wrong_files(folder: Path) -> list[Case]:
    """Return commands with files that are missing, unreadable, damaged or in a wrong format."""
    kind = "file"
    for name in ("no_idx", "no_bin", "cut_idx", "cut_bin", "no_magic", "wrong_ids"):
        write_dataset(folder / name)
    idx_path(folder / "no_idx").unlink()
    bin_path(folder / "no_bin").unlink()
    cut = idx_path(folder / "cut_idx")
    cut.write_bytes(cut.read_bytes()[:-5])
    short = bin_path(folder / "cut_bin")
    short.write_bytes(short.read_bytes()[:-2])
    magic = idx_path(folder / "no_magic")
    magic.write_bytes(b"NOTANIDX\x00" + magic.read_bytes()[9:])
    wrong = bin_path(folder / "wrong_ids")
    wrong.write_bytes(b"\xff\xff" * (wrong.stat().st_size // 2))
    write_dataset(folder / "short", num_tokens=5)
    (folder / "is_folder.idx").mkdir()
    (folder / "a_file").write_text("x")
    (folder / "empty.json").write_text("")
    replicas = ("placement=overlap_search", "launch.num_nodes=2")
    cases = [
        one(kind, f"data.train=[{name}]", says=[f"data.train[0]={name}", says], exit_code=DATA)
        for name, says in (
            ("nowhere", "no such file"),
            ("no_idx", "no such file"),
            ("no_bin", "no such file"),
            ("cut_idx", "must be"),
            ("cut_bin", "must be"),
            ("no_magic", "magic="),
            ("wrong_ids", "must be from 0 to"),
            ("short", "tokens"),
        )
    ]
    return [
        *cases,
        one(kind, "data.train=[corpus,corpus]", says=["data.train[1]=corpus", "must not be named twice"]),
        one(kind, "data.valid=[corpus]", says=["data.valid", "which is in data.train"]),
        one(kind, *replicas, "placement.loads_file=gone.json", says=["placement.loads_file=gone.json"], exit_code=DATA),
        one(
            kind, *replicas, "placement.loads_file=empty.json", says=["placement.loads_file=empty.json"], exit_code=DATA
        ),
        one(kind, *replicas, "placement.schedule=[1-x.json]", says=["must be ITERATION:FILE"]),
        one(
            kind, *replicas, "placement.schedule=['1:gone.json']", says=["placement.schedule=gone.json"], exit_code=DATA
        ),
        one(kind, "model.router=trace", "model.router_trace_file=gone.json", says=["gone.json"], exit_code=DATA),
        one(kind, "run.dir=a_file", says=["run.dir=a_file", "is a file"]),
        one(kind, "control.tls_dir=gone", says=["control.tls_dir=gone", "must contain ca.pem"]),
        one(kind, "launch.forkserver_socket=a_file", says=["must be the socket of a running fork server"]),
    ]


def wrong_tokenizers(folder: Path) -> list[Case]:
    """Return commands with tokenizers whose files are missing or damaged, or that do not fit the data or the model."""
    kind = "tokenizer"
    (folder / "broken.json").write_text('{"a": ')
    (folder / "list.json").write_text("[]")
    (folder / "merges.txt").write_text("#version: 0.2\nt h\n")
    write_dataset(folder / "other")
    (folder / "other.tokenizer.json").write_text(json.dumps({}))
    gpt2 = ("data.tokenizer=gpt2", "data.merges_file=merges.txt")
    huggingface = "data.tokenizer=huggingface"
    return [
        one(kind, "data.tokenizer=gpt2", says=["data.vocab_file=null", "and so must data.merges_file"]),
        one(kind, huggingface, says=["data.tokenizer_file=null", "must be given"]),
        one(kind, *gpt2, "data.vocab_file=gone.json", says=["data.vocab_file=gone.json"], exit_code=DATA),
        one(kind, *gpt2, "data.vocab_file=broken.json", says=["broken.json", "JSON"], exit_code=DATA),
        one(kind, *gpt2, "data.vocab_file=list.json", says=["list.json"], exit_code=DATA),
        one(kind, huggingface, "data.tokenizer_file=empty.json", says=["empty.json", "empty"], exit_code=DATA),
        one(kind, huggingface, "data.tokenizer_file=broken.json", says=["broken.json"], exit_code=DATA),
        one(kind, "model.vocab_size=10", says=["model.vocab_size=10", "at least 257"]),
        one(kind, "data.train=[other]", says=["other.tokenizer.json", "fingerprint of a tokenizer"], exit_code=DATA),
    ]


def wrong_environments(folder: Path) -> list[Case]:
    """Return commands of jobs that cannot start because of this machine, the launcher or the folder of runs."""
    kind = "environment"
    taken = folder / "runs" / "taken"
    taken.mkdir(parents=True)
    (taken / "metrics.jsonl").write_text("{}\n")
    (folder / "runs" / "file").write_text("")

    def under_torchrun(*words: str, says: Sequence[str], **variables: str) -> Case:
        return Case(kind=kind, words=words, errors=(tuple(says),), variables={**TORCHRUN, **variables})

    return [
        one(kind, "run.name=taken", says=["run.name=taken", "exists in", "choose another name"]),
        one(kind, "run.name=taken", "run.resume=must", says=["needs a checkpoint to continue from"]),
        one(kind, "run.name=file", says=["run.name=file", "is a file"]),
        one(kind, "run.resume=must", "run.name=null", says=["run.name=null", "must be given"]),
        one(kind, "control.interface=203.0.113.7", says=["must be an address of this machine"]),
        one(kind, "launch=torchrun", says=["launch.mode=torchrun", "not started by torchrun"]),
        one(kind, "launch.node_launcher=srun", says=["launch.node_launcher=srun"]),
        one(kind, "launch.node_launcher=none", "run.resume=auto", says=["launch.node_launcher=none"]),
        one(kind, "launch.node_launcher=gone:Class", says=["launch.node_launcher=gone:Class", "can be imported"]),
        under_torchrun("launch.ranks_per_node=4", says=["must be 2, the value of torchrun"]),
        under_torchrun(says=["launch.mode=torchrun", "rank 7"], RANK="7"),
        under_torchrun("snapshot=sparse_window", says=["snapshot.policy", "must be null with launch.mode=torchrun"]),
        one(kind, "model.hidden_size=65536", "model.ffn_hidden_size=262144", "model.num_layers=512", says=["GiB"]),
        one(kind, "limits.host_memory_bytes=1000", says=["limits.host_memory_bytes=1000", "instead of 1000 B"]),
    ]


def wrong_checkpoints(folder: Path) -> list[Case]:
    """Return commands with checkpoints from which the job cannot start."""
    save(folder / "saved" / "checkpoints" / directory_name(34), 34)
    (folder / "saved" / "config.yaml").write_text("x: 1\n")
    save(folder / "damaged", 3)
    (folder / "damaged" / MANIFEST_NAME).write_text("{")
    save(folder / "weights", 0, concerns=("model",))
    (folder / "foreign").mkdir()
    (folder / "foreign" / ".metadata").write_bytes(b"")
    (folder / "nothing").mkdir()
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text("{}")
    good = f"saved/checkpoints/{directory_name(34)}"
    table: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
        (("checkpoint.load=a_file",), ("must be an existing directory",)),
        (("checkpoint.load_weights=gone",), ("checkpoint.load_weights=gone", "existing directory")),
        (("checkpoint.load=saved",), ("is the folder of a run", good)),
        (("checkpoint.load=saved/checkpoints",), ("is a folder of checkpoints", good)),
        (("checkpoint.load=damaged",), ("damaged/manifest.json", "manifest is damaged: it is not valid JSON")),
        (("checkpoint.load=weights",), ("contains only weights", "set checkpoint.load_weights instead")),
        (("checkpoint.load=foreign",), ("has no manifest.json of this project",)),
        (("checkpoint.load=nothing",), ("contains no checkpoint",)),
        (("checkpoint.load_weights=hf",), ("is a Hugging Face folder", "from-hf")),
        ((f"checkpoint.load={good}", "model.num_moe_experts=16"), ("model.num_moe_experts: was 8, now 16",)),
        ((f"checkpoint.load={good}", "model.num_layers=6"), ("model.num_layers: was 4, now 6",)),
        ((f"checkpoint.load={good}", "model.vocab_size=1000"), ("model.vocab_size",)),
        (
            (f"checkpoint.load={good}", "parallel.use_distributed_optimizer=false"),
            ("parallel.use_distributed_optimizer: was true, now false",),
        ),
        ((f"checkpoint.load={good}", "training.frozen=experts"), ("training.frozen: was null, now experts",)),
        ((f"checkpoint.load_weights={good}", "model.hidden_size=96"), ("model.hidden_size",)),
    )
    return [one("checkpoint", *words, says=says, exit_code=CHECKPOINT) for words, says in table]


def save(path: Path, iteration: int, *, concerns: tuple[str, ...] = ()) -> None:
    """Write the manifest of a checkpoint of ``JOB``. If ``concerns`` are given, write only these settings."""
    config, _ = pretrain_moe.compose(list(JOB))
    settings = settings_of(config, data_fingerprint="", vocab_size=resolve_vocab_size(config))
    path.mkdir(parents=True)
    manifest = Manifest(
        run_id="ab" * 16,
        run_name="saved",
        generation=0,
        topology={"world_size": 1},
        iteration=iteration,
        consumed_samples=2 * iteration,
        settings={name: values for name, values in settings.items() if not concerns or name in concerns},
        software={},
        files=(),
    )
    manifest.write(path)


def combinations() -> list[Case]:
    """Return commands with several independent errors, and errors whose consequences must not be reported."""
    return [
        several(
            *("modle.num_layers=3", "training.seed=abc", "data.tran=[x]", "optimizer.lr=fast"),
            says=[["modle.num_layers=3"], ["training.seed=abc"], ["data.tran"], ["optimizer.lr=fast"]],
        ),
        several(
            *("model.num_layers=0", "training.micro_batch_size=0", "optimizer.lr=-1"),
            says=[["model.num_layers=0"], ["training.micro_batch_size=0"], ["optimizer.lr=-1"]],
        ),
        several(
            *("model.moe_router_topk=9", "data.train=[/nope,/gone]", "checkpoint.load=/nope", "control.tls_dir=/x"),
            says=[
                ["model.moe_router_topk=9"],
                ["data.train[0]=/nope"],
                ["data.train[1]=/gone"],
                ["checkpoint.load"],
                ["control.tls_dir"],
            ],
        ),
        several(
            *("model=mixtrl", "data.train=[/nope]", "optimizer.lr=0"),
            says=[["model=mixtrl", "mixtral_8x7b"], ["optimizer.lr=0"], ["data.train[0]=/nope"]],
        ),
        several(
            *("model.num_moe_experts=16", EP3, THREE, "model.moe_router_topk=17"),
            says=[["model.moe_router_topk=17", "num_moe_experts=16"], ["expert_model_parallel_size=3", "experts=16"]],
        ),
        several(
            *("checkpoint.load=/nope", "checkpoint.load_weights=/gone"),
            says=[["checkpoint.load_weights=/gone", "must be null"], ["checkpoint.load=/nope", "existing directory"]],
        ),
        several("data.train=[/nope,/gone]", says=[["data.train[0]=/nope"], ["data.train[1]=/gone"]], exit_code=DATA),
        several(
            "checkpoint.load=/nope",
            "run.name=taken",
            says=[["checkpoint.load"], ["run.name=taken"]],
            exit_code=CHECKPOINT,
        ),
        several(
            *("dry_run=true", "training.device=cuda", "limits.gpu_memory_bytes=1000", "limits.host_memory_bytes=1000"),
            says=[["limits.gpu_memory_bytes=1000"], ["limits.host_memory_bytes=1000"]],
        ),
        several("--num-layers=3", "model.hidden_sizee=4", says=[["model.num_layers=3"], ["model.hidden_sizee"]]),
        several("optimizer.lr=${gone}", "model.num_layers=0", says=[["optimizer.lr"], ["model.num_layers=0"]]),
        # Only the root cause must be reported, not its consequences.
        several(
            "model.num_moe_experts=0",
            "placement=overlap_search",
            "launch.num_nodes=2",
            says=[["model.num_moe_experts=0: must be at least 1"]],
        ),
        several("model.hidden_size=0", TWO, TP2, says=[["model.hidden_size=0: must be at least 1"]]),
        several(
            "model.num_moe_expert=16",
            TWO,
            "parallel.expert_model_parallel_size=16",
            says=[["model.num_moe_expert=16", "is not a known key"], ["the number of ranks of a pipeline stage"]],
        ),
        several(
            "training.train_iterations=0",
            "optimizer.lr_warmup_iterations=5",
            says=[["training.train_iterations=0: must be at least 1"]],
        ),
        several("launch.num_nodes=0", "placement=overlap_search", says=[["launch.num_nodes=0: must be at least 1"]]),
    ]
