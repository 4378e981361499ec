"""Trains moe_micro with Megatron-Core alone, and exchanges checkpoints with this project.

The file imports only torch, numpy and Megatron-Core. It replaces ``torch.cuda`` itself, and does what Megatron-LM's
``pretrain_gpt.py`` does with a model, its distributed optimizer and a checkpoint. Usage::

    python stock_megatron.py jobs.json results.json

``jobs.json`` is a list of jobs (``Job``). The process imports Megatron once, and forks the ranks of one job after the
other. ``results.json`` contains, for each job, the loss and the gradient norm of each iteration.
"""

import argparse
import contextlib
import json
import os
import queue
import sys
import tempfile
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

SEQUENCE, WIDTH, NUM_LAYERS, NUM_EXPERTS, FFN_WIDTH = 16, 32, 4, 8, 64
WEIGHT_DECAY, CLIP_GRAD = 0.1, 1.0
MAX_LR, MIN_LR = 0.01, 0.0001
"""Optimizer and scheduler get the same, as in Megatron-LM. Since 0.19.0, groups of parameters are found by them."""
TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(kw_only=True)
class Job:
    """One job of Megatron-Core."""

    samples: str
    """File with the array ``tokens``: int64 [iterations, samples of an iteration, SEQUENCE + 1]."""
    rates: list[float]
    """Learning rate of each iteration, beginning with iteration 1. The schedule in the checkpoint must give them."""
    vocab_size: int
    """Number of rows of the embedding."""
    last: int
    """Last iteration. If it is 0, the loss of iteration 1 is computed without an update."""
    world: int = 1
    dtype: str = "fp32"
    load: str | None = None
    """Folder of checkpoints in Megatron-LM's layout, or a checkpoint."""
    loads_optimizer: bool = True
    saves: dict[str, str] = field(default_factory=dict)
    """Folders in which a checkpoint is saved, by iteration."""
    saves_optimizer: bool = True
    sharding_type: str = "fully_reshardable"
    singleton_local_shards: bool = False
    """Megatron-LM always saves with False: one tensor for all layers or experts."""


# -- Megatron-Core on a CPU ------------------------------------------------------------------------------------


def install() -> None:
    """Replace what Megatron-Core calls in ``torch.cuda``, and import Megatron-Core."""
    cpu, cuda = torch.device("cpu"), torch.cuda

    class Idle:
        """A stream or event: all work on a CPU is complete when the call returns."""

        def __init__(self, *args: Any, **named: Any) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **named: self

    for name in ("synchronize", "empty_cache", "set_device", "reset_peak_memory_stats"):
        setattr(cuda, name, lambda *args, **named: None)
    cuda.current_device = lambda: cpu
    cuda.device_count = lambda: 1
    cuda.current_stream = cuda.default_stream = lambda device=None: Idle()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.Stream = cuda.Event = Idle
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed)) and None
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device="cpu": torch.get_rng_state()
    cuda.set_rng_state = lambda state, device="cpu": torch.set_rng_state(state)

    plain = torch.Tensor.type

    def named_type(self: torch.Tensor, dtype: Any = None, *args: Any, **named: Any) -> Any:
        if dtype is not None:
            return plain(self, dtype, *args, **named)
        return plain(self).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = named_type
    torch.Tensor.cuda = lambda self, *args, **named: self

    def on_cpu(factory: Any) -> Any:
        def make(*args: Any, **named: Any) -> Any:
            if str(named.get("device")).startswith("cuda"):
                named["device"] = cpu
            return factory(*args, **named)

        return make

    for name in ("empty", "zeros", "ones", "full", "tensor", "arange", "empty_like", "zeros_like", "ones_like"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    compiler, torch.compile = torch.compile, lambda function=None, **named: function
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    torch.compile = compiler
    random._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    moe_utils.te_general_gemm = None

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = to_host


# -- one rank ----------------------------------------------------------------------------------------------------


class Trainer:
    """Model and optimizer of one rank, built and used as Megatron-LM does."""

    def __init__(self, job: Job) -> None:
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.module import Float16Module

        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        self.job, self.iteration = job, 0
        self.group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        is_half = job.dtype == "bf16"
        dtype = torch.bfloat16 if is_half else torch.float32
        self.config = TransformerConfig(
            num_layers=NUM_LAYERS,
            hidden_size=WIDTH,
            num_attention_heads=4,
            ffn_hidden_size=FFN_WIDTH,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            num_moe_experts=NUM_EXPERTS,
            moe_layer_freq=1,
            moe_ffn_hidden_size=FFN_WIDTH,
            moe_router_topk=2,
            moe_router_load_balancing_type="aux_loss",
            moe_aux_loss_coeff=0.01,
            moe_z_loss_coeff=0.001,
            moe_router_dtype="fp32",
            moe_token_dispatcher_type="alltoall",
            moe_grouped_gemm=False,
            calculate_per_token_loss=True,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=is_half,
            use_cpu_initialization=True,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            persist_layer_norm=False,
        )
        self.bare = GPTModel(
            config=self.config,
            transformer_layer_spec=get_gpt_decoder_block_spec(
                self.config, use_transformer_engine=False, normalization="RMSNorm"
            ),
            vocab_size=job.vocab_size,
            max_sequence_length=SEQUENCE,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
        )
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        wrapped = Float16Module(self.config, self.bare) if is_half else self.bare
        self.model = DistributedDataParallel(self.config, ddp_config, wrapped)
        optimizer_config = OptimizerConfig(
            optimizer="adam",
            lr=MAX_LR,
            min_lr=MIN_LR,
            weight_decay=WEIGHT_DECAY,
            adam_beta1=0.9,
            adam_beta2=0.95,
            adam_eps=1e-8,
            clip_grad=CLIP_GRAD,
            params_dtype=dtype,
            bf16=is_half,
            use_distributed_optimizer=True,
        )
        self.optimizer = get_megatron_optimizer(optimizer_config, [self.model], use_gloo_process_groups=False)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=MAX_LR,
            min_lr=MIN_LR,
            lr_warmup_steps=0,
            lr_decay_steps=1000,
            lr_decay_style="constant",
            start_wd=WEIGHT_DECAY,
            end_wd=WEIGHT_DECAY,
            wd_incr_steps=1,
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=True,
        )
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.no_sync_func = self.model.no_sync
        self._allocate()

    def _allocate(self) -> None:
        # Megatron's state dicts need the state that the first update creates. With torch's AdamW, Megatron's own
        # function for this creates moments without a step count.
        for member in self._members():
            member.init_state_fn(member.optimizer, member.config)
            for state in member.optimizer.state.values():
                state.setdefault("step", torch.tensor(0.0))

    def _members(self) -> list[Any]:
        return list(getattr(self.optimizer, "chained_optimizers", [self.optimizer]))

    def iterate(self, *, updates: bool = True) -> tuple[float, float]:
        """Run the next iteration. Return its loss per token and the norm of the gradients."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        rows = np.load(self.job.samples)["tokens"][self.iteration]
        mine = torch.from_numpy(rows[self.group.rank() :: self.group.size()].copy())
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=iter(mine),
            model=[self.model],
            num_microbatches=len(mine),
            seq_length=SEQUENCE,
            micro_batch_size=1,
            forward_only=False,
        )
        total = torch.stack(reports).sum(dim=0)
        torch.distributed.all_reduce(total, group=self.group)
        loss = float(total[0] / total[1])
        if not updates:
            return loss, 0.0
        found, rate = {group["lr"] for group in self.optimizer.param_groups}, self.job.rates[self.iteration]
        assert found == {rate}, f"iteration {self.iteration + 1}: learning rate {found}, and not {rate}"
        is_done, norm, _ = self.optimizer.step()
        assert is_done
        self.iteration += 1
        self.scheduler.step(increment=len(rows))
        return loss, float(norm)

    @staticmethod
    def _forward(samples: Any, model: Any) -> Any:
        row = next(samples)
        output = model(row[None, :-1], torch.arange(SEQUENCE)[None], None, labels=row[None, 1:])

        def sum_of_losses(losses: torch.Tensor) -> Any:
            total, tokens = losses.float().sum(), torch.tensor(losses.numel(), dtype=torch.int32)
            return total, tokens, torch.stack([total.detach().double(), tokens.double()])

        return output, sum_of_losses

    def _args(self) -> argparse.Namespace:
        """Return the arguments that Megatron-LM stores, as far as a reader may need them."""
        batch = int(np.load(self.job.samples)["tokens"].shape[1])
        config = self.config
        return argparse.Namespace(
            num_layers=NUM_LAYERS,
            hidden_size=WIDTH,
            num_attention_heads=4,
            group_query_attention=False,
            num_query_groups=1,
            kv_channels=config.kv_channels,
            ffn_hidden_size=FFN_WIDTH,
            seq_length=SEQUENCE,
            max_position_embeddings=SEQUENCE,
            add_position_embedding=True,
            position_embedding_type="rope",
            rotary_base=10000,
            rotary_percent=1.0,
            rotary_interleaved=False,
            normalization=config.normalization,
            norm_epsilon=config.layernorm_epsilon,
            swiglu=True,
            squared_relu=False,
            add_bias_linear=False,
            add_qkv_bias=False,
            qk_layernorm=False,
            untie_embeddings_and_output_weights=True,
            num_experts=NUM_EXPERTS,
            moe_layer_freq=1,
            moe_ffn_hidden_size=FFN_WIDTH,
            moe_router_topk=2,
            moe_router_pre_softmax=False,
            moe_router_score_function="softmax",
            moe_shared_expert_intermediate_size=None,
            multi_latent_attention=False,
            make_vocab_size_divisible_by=128,
            padded_vocab_size=self.job.vocab_size,
            tensor_model_parallel_size=1,
            pipeline_model_parallel_size=1,
            world_size=self.job.world,
            data_parallel_size=self.job.world,
            iteration=self.iteration,
            consumed_train_samples=self.iteration * batch,
            params_dtype=self.config.params_dtype,
        )

    def save(self, folder: Path) -> None:
        """Save a checkpoint into a folder in Megatron-LM's layout."""
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.mapping import ShardedObject
        from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
        from megatron.core.dist_checkpointing.strategies import filesystem_async
        from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

        # Megatron would start a process that serves a queue. It would outlive this rank, which is forked.
        filesystem_async._results_queue = queue.Queue()
        stored = {
            "distrib_optim_sharding_type": self.job.sharding_type,
            "distrib_optim_fully_reshardable_mem_efficient": False,
            "singleton_local_shards": self.job.singleton_local_shards,
            "chained_optim_avoid_prefix": True,
        }
        metadata = {**stored, "dp_cp_group": self.group}
        state: dict[str, Any] = {"args": self._args(), "checkpoint_version": 3.0, "iteration": self.iteration}
        state["model"] = self.bare.sharded_state_dict(metadata=metadata)
        if self.job.saves_optimizer:
            state["optimizer"] = self.optimizer.sharded_state_dict(state, metadata=metadata)
            state["opt_param_scheduler"] = self.scheduler.state_dict()
        rank = self.group.rank()
        generators = [{"torch_rng_state": torch.get_rng_state()}]
        state["rng_state"] = ShardedObject("rng_state", generators, (1, 1), (0, 0), replica_id=rank)
        directory = folder / f"iter_{self.iteration:07d}"
        if rank == 0:
            directory.mkdir(parents=True)
        torch.distributed.barrier()
        strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy("torch_dist"), self.group)
        dist_checkpointing.save(state, str(directory), strategy, content_metadata=stored)
        if rank == 0:
            (folder / TRACKER).write_text(str(self.iteration))
        torch.distributed.barrier()

    def load(self, path: Path) -> None:
        """Load a checkpoint as Megatron-LM does: with the description of its content that it contains."""
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
        from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

        if (path / TRACKER).exists():
            path = path / f"iter_{int((path / TRACKER).read_text()):07d}"
            args = dist_checkpointing.load_common_state_dict(str(path))["args"]
            # What Megatron-LM's ``check_checkpoint_args`` and ``load_checkpoint`` read.
            assert (args.num_layers, args.hidden_size, args.num_attention_heads) == (NUM_LAYERS, WIDTH, 4)
            assert args.padded_vocab_size == self.job.vocab_size and args.add_position_embedding
            assert args.consumed_train_samples == args.iteration * np.load(self.job.samples)["tokens"].shape[1]
        metadata = {**dist_checkpointing.load_content_metadata(str(path)), "dp_cp_group": self.group}
        state = {"model": self.bare.sharded_state_dict(metadata=metadata)}
        if self.job.loads_optimizer:
            state["optimizer"] = self.optimizer.sharded_state_dict(state, is_loading=True, metadata=metadata)
        strategy = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(str(path)), self.group)
        loaded = dist_checkpointing.load(state, str(path), strategy)
        self.bare.load_state_dict(loaded["model"], strict=True)
        if not self.job.loads_optimizer:
            self.optimizer.reload_model_params()
            return
        self._load_optimizer(loaded["optimizer"])
        self.iteration = loaded["iteration"]
        self.scheduler.load_state_dict(loaded["opt_param_scheduler"])

    def _load_optimizer(self, loaded: dict[Any, Any]) -> None:
        # Megatron's ``load_state_dict`` cannot load this format into torch's AdamW, which it uses on a CPU: it looks
        # for a stored tensor for each step count. It also gives all parameters the same step tensor, to which AdamW
        # adds 1 for each parameter. With Transformer Engine or apex, the step is a number of the parameter group.
        members = self._members()
        frames = [loaded] if len(members) == 1 else [loaded[number] for number in range(len(members))]
        for member, frame in zip(members, frames, strict=True):
            assert frame["param_state_sharding_type"] == "fully_reshardable"
            tensors = frame.pop("param_state")
            member.load_state_dict(frame)
            states = list(member.optimizer.state.values())
            steps = [state.pop("step") for state in states]
            member.load_parameter_state_from_fully_reshardable(tensors)
            for state, step in zip(states, steps, strict=True):
                state["step"] = step.clone()


def run_rank(job: Job, rank: int, store: str) -> list[list[float]]:
    """Run one rank of ``job``. Return [loss, gradient norm] of each iteration."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=job.world)
    trainer = Trainer(job)
    if job.load is not None:
        trainer.load(Path(job.load))
    if job.last == 0:
        return [list(trainer.iterate(updates=False))]
    results = []
    while trainer.iteration < job.last:
        results.append(list(trainer.iterate()))
        if folder := job.saves.get(str(trainer.iteration)):
            trainer.save(Path(folder))
    return results


def run_job(job: Job) -> list[list[float]]:
    """Fork the ranks of ``job``, and return the results of rank 0."""
    with tempfile.TemporaryDirectory() as scratch:
        children = []
        for rank in range(job.world):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    results = run_rank(job, rank, f"{scratch}/store")
                    Path(scratch, f"{rank}.json").write_text(json.dumps(results))
                    code = 0
                except BaseException:  # noqa: BLE001 - the parent ends with an error
                    traceback.print_exc()
                sys.stderr.flush()
                os._exit(code)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            sys.exit(f"ranks of {job} ended with {codes}")
        return json.loads(Path(scratch, "0.json").read_text())


def main() -> None:
    """Run the jobs in the file that the command line names."""
    import warnings

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    install()
    jobs = [Job(**each) for each in json.loads(Path(sys.argv[1]).read_text())]
    Path(sys.argv[2]).write_text(json.dumps([run_job(job) for job in jobs]))


if __name__ == "__main__":
    main()
