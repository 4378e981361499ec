"""Provides the needs of a job and a machine that meets all of them, for tests that take one thing away."""

from collections.abc import Sequence

from megatron_ft.doctor.clocks import ClockFacts
from megatron_ft.doctor.findings import Finding
from megatron_ft.doctor.memory import MemoryFacts
from megatron_ft.doctor.needs import JobNeeds
from megatron_ft.doctor.network import Interface, NetworkFacts
from megatron_ft.doctor.software import SoftwareFacts
from megatron_ft.doctor.storage import StorageFacts
from megatron_ft.doctor.supported import PACKAGES
from megatron_ft.planning.devices import DeviceFacts

GIB = 1 << 30
NEEDS = JobNeeds(
    mode="local",
    interface="10.0.0.5",
    master_port=0,
    run_dir="runs",
    run_name=None,
    nodes_here=2,
    num_nodes=2,
    ranks_per_node=4,
    ranks_per_gpu=1,
    world_size=8,
    device="cpu",
    device_reason="training.device=cpu",
    uses_transformer_engine=False,
    host_bytes=8 * GIB,
    snapshot_server_bytes=2 * GIB,
    largest_file_bytes=GIB,
    checkpoint_bytes=4 * GIB,
    num_checkpoints=3,
    persisted_bytes=GIB,
)
NETWORK = NetworkFacts(
    interfaces={
        "lo": Interface(is_up=True, addresses=("127.0.0.1", "::1")),
        "eth0": Interface(is_up=True, addresses=("10.0.0.5",)),
        "eth1": Interface(is_up=False, addresses=("10.0.1.5",)),
        "ib0": Interface(is_up=True, addresses=()),
    },
    resolved=("10.0.0.5",),
    bind_error=None,
    ephemeral=(32768, 60999),
)
MEMORY = MemoryFacts(
    total_bytes=64 * GIB,
    available_bytes=60 * GIB,
    cgroup_limit_bytes=None,
    cgroup_used_bytes=0,
    limits={
        "open_files": (1024, 4096),
        "file_size": (None, None),
        "address_space": (None, None),
        "data": (None, None),
        "locked": (None, None),
    },
    shared_total_bytes=32 * GIB,
    shared_free_bytes=32 * GIB,
    has_infiniband=True,
)
STORAGE = StorageFacts(
    folder="runs",
    file_system="ext4",
    options=("rw", "relatime"),
    free_bytes=100 * GIB,
    flush_seconds=(0.002, 0.001, 0.009),
)
CLOCKS = ClockFacts(
    wall_unix_seconds=1.8e9,
    elapsed_monotonic_seconds=0.1,
    elapsed_wall_seconds=0.1001,
    is_synchronized=True,
    source="chronyc",
)
DEVICES = DeviceFacts(has_driver=True, driver="580.65.06", num_gpus=8, gpu_memory_bytes=80 * GIB)
SOFTWARE = SoftwareFacts(
    python="3.11.7",
    versions={
        **{package.name: package.versions.removeprefix("==") for package in PACKAGES if package.is_required},
        "megatron-core": "0.16.1",
        "numpy": "2.4.6",
        "torch": "2.13.0",
        "nvidia-nccl-cu13": "2.28.9",
    },
    torch_requires=('nvidia-nccl-cu13==2.28.9; python_version >= "3"', "filelock", 'nvidia-nccl-cu12==1; extra == "x"'),
)


def judged(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings that are errors or warnings."""
    return [finding for finding in findings if finding.level != "info"]
