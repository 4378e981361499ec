"""Claim ``foreign-checkpoints``: a dense checkpoint or window is never loaded under a wrong identity.

A rank of a real job starts repeatedly in a folder whose checkpoints or windows have been changed. They are renamed,
swapped, damaged, or mixed with those of another run or of a job with other data, model, optimizer or schedule. The
loaded state is compared tensor by tensor with the state that the run saved under that iteration.
"""

import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.report import finish, parse_arguments
from megatron_ft.config.job import JobConfig
from megatron_ft.corpus.samples import check_data
from megatron_ft.errors import CheckpointError, DataError
from megatron_ft.testing.ranks import Rank, compose, run_ranks

ID = "foreign-checkpoints"
MIN_TRIALS = 3000
DENSE, WINDOWS = 600, 2600
QUICK_DENSE, QUICK_WINDOWS = 8, 40
THRESHOLD = (
    f"0 loaded for what they are not in at least {MIN_TRIALS} trials; another run's cost none of the run's own; "
    "other data, model, optimizer and schedule are refused by the name of the key"
)
OLD, NEW = 5, 14
_JOB = (
    "model=moe_micro",
    "training.micro_batch_size=1",
    "training.global_batch_size=2",
    "training.eval_interval_iterations=0",
    "training.device=cpu",
    "checkpoint.async_save=false",
    "checkpoint.keep_last=0",
)
Action = Callable[[random.Random, Path, Path], str]
"""Function that changes a folder. Its arguments are a random generator, the folder with the run's own samples, and a
folder with all samples. It returns the expected outcome in the form of ``judge``'s argument ``expected``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Change the folders, start the rank on each, and judge the loads."""
    arguments = parse_arguments(__doc__, argv)
    config = compose(*_JOB)
    check_data(config)
    numbers = (QUICK_DENSE, QUICK_WINDOWS) if arguments.quick else (DENSE, WINDOWS)
    with tempfile.TemporaryDirectory(prefix="foreign-") as folder:
        (result,) = run_ranks(
            partial(_trials, numbers), config, world_size=1, run_dir=Path(folder, "run"), timeout_seconds=3000.0
        )
    counts, problems = Counter(result["counts"]), result["problems"]
    planned = sum(numbers)
    wrong = sum(count for name, count in counts.items() if name.endswith("_wrong"))
    figure = (
        f"{wrong} of {planned} loaded for what they are not ({numbers[0]} starts with dense checkpoints, {numbers[1]} "
        f"with windows): {_sum(counts, '_loaded')} loaded the state that the name says, {_sum(counts, '_named')} were "
        f"refused by the key that differs, {_sum(counts, '_nothing')} found nothing they could use"
    )
    is_complete = arguments.quick or planned >= MIN_TRIALS
    for problem in problems[:20]:
        print(problem, file=sys.stderr)
    return finish(
        arguments.out,
        ID,
        passed=not problems and is_complete and sum(counts.values()) == planned,
        figure=figure,
        threshold=THRESHOLD,
        counts=dict(sorted(counts.items())),
        details={"problems": problems[:100]},
    )


def _sum(counts: Counter[str], suffix: str) -> int:
    return sum(count for name, count in counts.items() if name.endswith(suffix))


def judge(expected: str, loaded: int | None, is_equal: bool, error: str) -> str:
    """Classify a start. ``loaded``, ``named`` (an allowed error) and ``nothing`` keep the claim; ``wrong``, ``lost``
    and ``mute`` (another error) violate it.

    Args:
        expected: Allowed results, separated by spaces: an iteration that may be loaded, a word that an error may
            contain, or ``none`` if the start may find nothing to load. One of them must be the result.
        loaded: Iteration in the name of the loaded sample; None if nothing was loaded.
        is_equal: Whether all tensors equal those that the run saved under that iteration.
        error: Error of the start; empty if there was none.
    """
    words = expected.split()
    if loaded is not None:
        return "wrong" if not is_equal else "loaded" if str(loaded) in words else "lost"
    if any(word in error for word in words if not word.isdecimal() and word != "none"):
        return "named"
    if "none" in words:
        return "nothing"
    return "lost" if not error else "mute"


def _trials(numbers: tuple[int, int], config: JobConfig, rank: Rank) -> dict[str, Any]:
    """Run all trials in a separate rank."""
    from benchmarks.foreign_samples import write_samples
    from megatron_ft.testing.ranks import join

    trainer, groups = join(config, rank)
    samples = write_samples(rank.run_dir.parent / "samples", trainer, groups)
    counts: Counter[str] = Counter()
    problems: list[str] = []
    for kind, number, start in (("dense", numbers[0], _start_dense), ("windows", numbers[1], _start_window)):
        generator, names = random.Random(kind), list(ACTIONS)
        for trial in range(number):
            name = names[trial % len(names)]
            folder = rank.run_dir / ("checkpoints" if kind == "dense" else "windows")
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(samples.folder / kind / "own", folder, copy_function=os.link)
            (folder / "latest").unlink(missing_ok=True)
            expected = ACTIONS[name](generator, folder, samples.folder / kind)
            found = sorted(path.name for path in folder.iterdir())
            loaded, is_equal, error = start(trainer, folder, samples)
            outcome = judge(expected, loaded, is_equal, error)
            counts[f"{kind}_{name}_{outcome}"] += 1
            if outcome in ("wrong", "lost", "mute"):
                problems.append(f"{kind} {trial}, {name}: {outcome}: {found}, {expected=}, {loaded=}, {error[:500]}")
    return {"counts": dict(counts), "problems": problems}


def _start_dense(trainer: Any, folder: Path, samples: Any) -> tuple[int | None, bool, str]:
    """Start the rank and load a dense checkpoint. Return (iteration, whether its tensors are those that the run saved,
    error)."""
    from dataclasses import replace

    from benchmarks.foreign_samples import OWN, digest_of, fill
    from megatron_ft.mcore.recovery.restart import select_restore_source
    from megatron_ft.snapshot.storage.checkpoints import iteration_of

    shutil.rmtree(trainer.context.run_dir / "windows", ignore_errors=True)
    fill(trainer, "the loaded tensors equal no saved state")
    try:
        context = replace(trainer.context, resume_from=folder)
        source, _ = select_restore_source(trainer.config, context, trainer.checkpoints, trainer.open_restorer(None))
        if source is None:
            return None, True, ""
        trainer.load(source)
    except (CheckpointError, DataError) as error:
        return None, True, str(error)
    named = iteration_of(source)
    is_equal = digest_of(trainer) == samples.digests.get((OWN, named)) and trainer.engine.iteration == named
    return named, is_equal, ""


def _start_window(trainer: Any, folder: Path, samples: Any) -> tuple[int | None, bool, str]:
    """Start the rank and load a window. Return the same values as ``_start_dense``. The compared tensors are those with
    which a replay would begin."""
    from benchmarks.foreign_samples import ITERATIONS, OWN, window_payload

    try:
        window = trainer.open_restorer(None).find(None)
    except CheckpointError as error:
        return None, True, str(error)
    if window is None:
        return None, True, ""
    start = window.window.start_iteration
    is_equal = start in ITERATIONS and window_payload(OWN, start) == tuple(map(bytes, window.slices))
    return start, is_equal, ""


# -- what is done to a folder ---------------------------------------------------------------------------------


def _directory(folder: Path, iteration: int) -> Path:
    return folder / (f"window_{iteration:07d}" if "windows" in folder.parts else f"iter_{iteration:07d}")


def _other_name(generator: random.Random, folder: Path) -> Path:
    """Return a name that no sample has, mostly that of a newer iteration."""
    path = _directory(folder, generator.choice((1, 13, 15, 50, generator.randrange(60, 9_999_999))))
    suffix = generator.choice(("", "", f".{generator.randrange(1, 99)}"))
    return path.with_name(path.name + suffix)


def rename(generator: random.Random, folder: Path, samples: Path) -> str:
    """Rename one of the two samples, so that only the other sample can be loaded."""
    victim, other = generator.sample((OLD, NEW), 2)
    _directory(folder, victim).rename(_other_name(generator, folder))
    return str(other)


def swap_names(generator: random.Random, folder: Path, samples: Path) -> str:
    """Exchange the names of both samples, so that neither name is right."""
    old, new = _directory(folder, OLD), _directory(folder, NEW)
    old.rename(folder / "aside")
    new.rename(old)
    (folder / "aside").rename(new)
    return "none renamed"


def other_run(generator: random.Random, folder: Path, samples: Path) -> str:
    """Add a sample of another run under its own name or another name, or replace a sample of the run by it."""
    iteration = generator.choice((OLD, NEW))
    target = generator.choice((_directory(folder, iteration), _other_name(generator, folder)))
    left = [found for found in (OLD, NEW) if _directory(folder, found) != target]
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(_directory(samples / "run", iteration), target)
    return str(max(left))


def only_other_run(generator: random.Random, folder: Path, samples: Path) -> str:
    """Replace the whole folder by that of another run."""
    shutil.rmtree(folder)
    shutil.copytree(samples / "run", folder)
    (folder / "latest").unlink(missing_ok=True)
    return "none is of another run"


def other_job(job: str, key: str, generator: random.Random, folder: Path, samples: Path) -> str:
    """Replace the newest sample by one that this run wrote with the settings of ``job``. The start must end with an
    error that names ``key``."""
    target = _directory(folder, NEW)
    shutil.rmtree(target)
    shutil.copytree(_directory(samples / job, NEW), target)
    return key


def swap_files(generator: random.Random, folder: Path, samples: Path) -> str:
    """Replace some files of the newest sample by those of another sample. The result is intact only if all files are
    replaced."""
    job = generator.choice(("own", "run", "data", "model", "optimizer", "schedule"))
    victim = _directory(folder, NEW)
    source = _directory(samples / job, OLD if job == "own" else generator.choice((OLD, NEW)))
    names = sorted(path.name for path in victim.iterdir() if (source / path.name).exists())
    most = len(names) - 1 if len(names) > 1 else 1
    for name in generator.sample(names, generator.randint(1, most)):
        (victim / name).unlink()
        shutil.copyfile(source / name, victim / name)
    keys = " ".join(dict(_KEYS).values())
    return f"{OLD} {NEW} {keys}" if job != "own" else f"{OLD} {NEW}"


def exchange(generator: random.Random, folder: Path, samples: Path) -> str:
    """Exchange the names of two files of the newest sample, or replace one by a file of the older sample."""
    mine, other = _directory(folder, NEW), _directory(folder, generator.choice((OLD, NEW)))
    one, two = generator.choice(sorted(mine.iterdir())), generator.choice(sorted(other.iterdir()))
    first, second = one.read_bytes(), two.read_bytes()
    for path, content in ((one, second), (two, first)):
        path.unlink()
        path.write_bytes(content)
    return f"{OLD} {NEW} none must hold"


def flip(generator: random.Random, folder: Path, samples: Path) -> str:
    """Flip one to three bits of the newest sample."""
    path = generator.choice(sorted(_directory(folder, NEW).iterdir()))
    content = bytearray(path.read_bytes())
    for _ in range(generator.randint(1, 3)):
        content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    path.unlink()
    path.write_bytes(content)
    return f"{OLD} {NEW}"


def tear(generator: random.Random, folder: Path, samples: Path) -> str:
    """Cut a file of the newest sample, fill a part of it with zeros, or remove it."""
    path = generator.choice(sorted(_directory(folder, NEW).iterdir()))
    content = bytearray(path.read_bytes())
    at = generator.randrange(len(content))
    path.unlink()
    kind = generator.randrange(3)
    if kind == 0:
        path.write_bytes(content[:at])
    elif kind == 1:
        content[at : at + 4096] = bytes(len(content[at : at + 4096]))
        path.write_bytes(content)
    return f"{OLD} {NEW}"


def older_format(generator: random.Random, folder: Path, samples: Path) -> str:
    """Mark the newest sample as format 1, which contains no run and no settings, with a valid checksum."""
    import xxhash

    from benchmarks.hostile_files import forge

    path = sorted(_directory(folder, NEW).glob("*.window"))
    if path:
        content = path[0].read_bytes()
        length = int.from_bytes(content[12:20], "little")
        body = {**json.loads(content[36 : 36 + length]), "format_version": 1, "run_id": "run"}
        start = -(-(36 + length) // 4096) * 4096
        path[0].unlink()
        path[0].write_bytes(forge(json.dumps(body).encode(), content[start:], version=1))
        return str(OLD)
    manifest = _directory(folder, NEW) / "manifest.json"
    body = json.loads(manifest.read_bytes())
    for name in ("settings", "run_name", "manifest_xxh3_128"):
        del body[name]
    body |= {"format_version": 1, "run_id": "run", "config_digest": "0" * 16}
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    body["manifest_xxh3_128"] = xxhash.xxh3_128_hexdigest(text)
    manifest.unlink()
    manifest.write_text(json.dumps(body))
    return str(OLD)


_KEYS = (
    ("data", "data.seed"),
    ("model", "model.moe_aux_loss_coeff"),
    ("optimizer", "optimizer.weight_decay"),
    ("schedule", "optimizer.lr"),
)
ACTIONS: dict[str, Action] = {
    "rename": rename,
    "swap_names": swap_names,
    "other_run": other_run,
    "only_other_run": only_other_run,
    **{f"other_{job}": partial(other_job, job, key) for job, key in _KEYS},
    "swap_files": swap_files,
    "exchange": exchange,
    "flip": flip,
    "tear": tear,
    "older_format": older_format,
}
"""All changes of a folder, by name."""


if __name__ == "__main__":
    sys.exit(main())
