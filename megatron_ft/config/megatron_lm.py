"""Translates a command line of Megatron-LM to overrides. ``megatron_flags.txt`` lists for each flag the keys that
replace it, or why no key does. Used by ``tools/from_megatron``, the entry point and ``docs/from-megatron-lm.md``."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from megatron_ft.config.overrides import flag_error, grammar_value
from megatron_ft.config.serialize import close_matches
from megatron_ft.errors import ConfigError

TABLE = Path(__file__).with_name("megatron_flags.txt")
VERSION = "core_v0.16.1"
"""Release of Megatron-LM whose flags ``TABLE`` contains. This project uses Megatron-Core of the same release."""
_NUMBER = re.compile(r"-?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
Given = Mapping[str, Sequence[str]]
"""Maps the name (without leading dashes) of each flag of a command line to the flag's values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag of Megatron-LM, as a line of ``TABLE`` describes it."""

    name: str
    """Name of the flag without leading dashes, e.g. ``num-layers``."""
    takes: str
    """Number of values that the flag takes: ``nothing``, ``one`` or ``several``."""
    section: str
    answer: str
    """Column ANSWER of ``TABLE``, with the flag's name in place of ``*``, e.g. ``model.num_layers`` for ``model.*``."""
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Translation of one flag of a command line, or the reason why it has no translation."""

    given: str
    """The flag with its values, as the command line gives it."""
    kind: str
    """Kind of answer. ``key``: the keys in ``overrides`` have the effect of the flag. ``always``: every job behaves as
    the flag requests. ``none``: no key has the effect of the flag. ``refused``: Megatron-LM has no such flag, or the
    given values are wrong."""
    overrides: tuple[str, ...] = ()
    note: str = ""

    def sentence(self) -> str:
        """Return one line for an error message: what to write instead of the flag, or why to leave it out."""
        if self.kind == "key":
            note = f"; {self.note}" if self.note else ""
            return f"{self.given}: must be written as {' '.join(self.overrides)}{note} (docs/from-megatron-lm.md)"
        if self.kind == "always":
            return f"{self.given}: must be left out, as every job behaves like this; {self.note or 'there is no key'}"
        if self.kind == "none":
            return f"{self.given}: has no counterpart: {self.note}; leave it out"
        return f"{self.given}: {self.note}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A translated command line."""

    answers: tuple[Answer, ...]
    """Translation of each flag, in the order of the command line. Translations of the launcher's options come first."""
    defaults: tuple[Answer, ...] = ()
    """Overrides for flags that are not given and whose default differs between Megatron-LM and this project."""
    launcher: tuple[str, ...] = ()
    """Words of the command line before the Python file, e.g. ``torchrun --nnodes 8``."""

    @property
    def overrides(self) -> list[str]:
        """Return all overrides, those of whole groups first. Of several overrides of one key, return only the last."""
        words = [word for each in (*self.defaults, *self.answers) for word in each.overrides]
        last = {word.partition("=")[0]: word for word in words}
        return sorted(last.values(), key=lambda word: "." in word.partition("=")[0])

    def with_kind(self, kind: str) -> list[Answer]:
        """Return the entries of ``answers`` that have the given ``kind``, e.g. ``refused``."""
        return [each for each in self.answers if each.kind == kind]


@functools.cache
def flags() -> dict[str, Flag]:
    """Read ``TABLE``. Map the name of each flag to the flag."""
    found: dict[str, Flag] = {}
    section = ""
    _, _, table = TABLE.read_text(encoding="utf-8").partition("\n\n")
    for line in table.splitlines():
        if line.startswith("# "):
            section = line[2:]
            continue
        names, _, rest = line.partition(" | ")
        answer, _, note = rest.partition(" | ")
        for word in names.split():
            name, equals, dots = word.partition("=")
            own = answer.replace(".*", "." + name.replace("-", "_"))
            takes = "several" if dots else "one" if equals else "nothing"
            assert name not in found, f"{TABLE.name} contains --{name} twice"
            found[name] = Flag(name=name, takes=takes, section=section, answer=own, note=note)
    return found


def translate(words: Sequence[str]) -> Translation:
    """Translate a command line of Megatron-LM. A launcher and a Python file before the flags are optional."""
    start = next((at + 1 for at, word in enumerate(words) if word.endswith(".py")), 0)
    launcher = tuple(words[: max(start - 1, 0)])
    given, refused = _parse(words[start:])
    launched = _launched(launcher)
    # Functions of ``_SPECIAL`` also need the launcher's overrides. These contain "=", so they differ from all flags.
    known = {**given, **{word: [] for each in launched for word in each.overrides}}
    answers = []
    for name, values in given.items():
        answers.append(_answer(name, values, known) if name in flags() else refused[name])
    defaults = _defaults(given) if "num-layers" in given else ()
    return Translation(answers=(*launched, *answers), defaults=tuple(defaults), launcher=launcher)


def _parse(words: Sequence[str]) -> tuple[dict[str, list[str]], dict[str, Answer]]:
    """Return the values of each flag, and the refusals of unknown flags and of words that follow no flag."""
    given: dict[str, list[str]] = {}
    refused: dict[str, Answer] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            given.pop(name, None)  # the last one counts, as in argparse
            given[name] = [value] if equals else []
            if name not in flags():
                note = f"is not a flag of Megatron-LM {VERSION}{close_matches(name, flags())}"
                refused[name] = Answer(given=word, kind="refused", note=note)
        else:
            given.setdefault(name, []).append(word)
    if stray := given.get(""):
        note = f"must follow a flag: a command line of Megatron-LM {VERSION} has only flags"
        refused[""] = Answer(given=" ".join(stray), kind="refused", note=note)
    return given, refused


def _answer(name: str, values: Sequence[str], given: Given) -> Answer:
    flag = flags()[name]
    text = " ".join([f"--{name}", *values]) if len(values) != 1 else f"--{name}={values[0]}"
    if flag.takes == "nothing" and values:
        return Answer(given=text, kind="refused", note="must be given without a value; remove the value")
    if flag.takes != "nothing" and not values:
        return Answer(given=text, kind="refused", note=f"must be followed by a value; write it as {_shape(flag)}")
    if flag.takes == "one" and len(values) > 1:
        return Answer(given=text, kind="refused", note="must be followed by one value; remove the others")
    if flag.answer == "none":
        return Answer(given=text, kind="none", note=flag.note)
    head, _, accepted = flag.answer.partition(" ")
    if head == "always":
        is_so = not accepted or list(values) == accepted.split()
        return Answer(given=text, kind="always" if is_so else "none", note=flag.note)
    if head == "special":
        try:
            kind, overrides, note = _SPECIAL[name](values, given)
        except (ValueError, ZeroDivisionError):
            rule = "must be a number; all numbers of layers and stages must be whole and above 0"
            note = "must be numbers with a sum above 0, e.g. 98,2,0" if name == "split" else rule
            return Answer(given=text, kind="refused", note=note)
        return Answer(given=text, kind=kind, overrides=tuple(overrides), note=note)
    if accepted.startswith("in "):
        if values[0] not in accepted.split()[1:]:
            return Answer(given=text, kind="none", note=flag.note)
        return Answer(given=text, kind="key", overrides=(f"{head}={values[0]}",))
    value = _value(values) if flag.takes != "nothing" else ""
    words = [key.removesuffix("=*") for key in flag.answer.split()]
    overrides = tuple(key if "=" in key else f"{key}={value}" for key in words)
    return Answer(given=text, kind="key", overrides=overrides, note=flag.note)


def _shape(flag: Flag) -> str:
    """Return how to write ``flag``: ``key=<value>`` for each key that replaces it; without keys, ``--flag=<value>``."""
    keys = [key.removesuffix("=*") for key in flag.answer.split(" in ")[0].split() if "." in key]
    return " ".join(f"{key}=<value>" for key in keys) or f"--{flag.name}=<value>"


def _value(values: Sequence[str]) -> str:
    """Write the values of a flag in Hydra's grammar: one value as it is, several values as a list."""
    written = [value if _NUMBER.fullmatch(value) else grammar_value(value) for value in values]
    return written[0] if len(written) == 1 else f"[{','.join(written)}]"


_TORCHRUN = "launch=torchrun"


def _launched(launcher: Sequence[str]) -> list[Answer]:
    """Translate the numbers of nodes and ranks in the words of the launcher, e.g. ``torchrun --nnodes 8``."""
    options: dict[str, str] = {}
    words = list(launcher)
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        options[name.replace("_", "-")] = value if equals else "".join(words[at + 1 : at + 2])
    answers = []
    for name, key in (("--nnodes", "launch.num_nodes"), ("--nproc-per-node", "launch.ranks_per_node")):
        if (count := options.get(name, "")).isdigit():
            answers.append(Answer(given=f"{name}={count}", kind="key", overrides=(f"{key}={count}",)))
    if options.get("--nnodes", "1") not in ("", "1"):
        note = "torchrun starts pretrain_moe.py on every node, as before"
        answers.insert(0, Answer(given=launcher[0], kind="key", overrides=(_TORCHRUN,), note=note))
    return answers


# Functions for "special" flags. Arguments: values of the flag; all flags. Results: kind, overrides, note of ``Answer``.

Computed = tuple[str, Sequence[str], str]


def _exit_duration(values: Sequence[str], given: Given) -> Computed:
    if _TORCHRUN in given:
        return "none", (), "under torchrun, a job saves and ends when Slurm signals before the time limit"
    return "key", [f"training.exit_after_minutes={values[0]}"], ""


def _number(given: Given, name: str) -> int | None:
    """Return the value of the flag ``name`` if it is given and is a whole number, otherwise None."""
    values = given.get(name, ())
    return int(values[0]) if len(values) == 1 and values[0].isdigit() else None


def _rope_type(values: Sequence[str], given: Given) -> Computed:
    if values[0] == "yarn" and "multi-latent-attention" in given:
        return "key", ["model.rope_type=yarn"], ""
    if values[0] == "rope":
        return "always", (), "rotary positions are not extended unless model.rope_type=yarn"
    return "none", (), "only latent attention has an extension of rotary positions (model.rope_type=yarn)"


def _rotary_scaling(values: Sequence[str], given: Given) -> Computed:
    if float(values[0]) <= 1:
        return "always", (), "rotary positions are not extended by default"
    if "multi-latent-attention" not in given or given.get("rope-type") == ["rope"]:
        return "none", (), "only yarn with latent attention extends rotary positions (model.rope_type=yarn)"
    return "key", ["model.rope_type=yarn", f"model.rotary_scaling_factor={values[0]}"], ""


_LIST = re.compile(r"\[([01](?:,[01])*)\](?:\*(\d+))?")


def moe_pattern(text: str, num_layers: int) -> list[int] | None:
    """Return one number per layer: 1 for an MoE layer, 0 for a dense layer. ``text`` is the value of
    ``--moe-layer-freq``: a distance between MoE layers, or a sum of lists such as ``([0]*3+[1]*58)``. Return None for
    any other ``text``, and for lists that do not have ``num_layers`` entries."""
    if text.isdigit() and int(text) > 0:
        return [int(layer % int(text) == 0) for layer in range(num_layers)]
    pattern: list[int] = []
    for part in text.replace(" ", "").strip("()").split("+"):
        match = _LIST.fullmatch(part.strip("()"))
        if match is None:
            return None
        pattern += [int(each) for each in match[1].split(",")] * int(match[2] or 1)
    return pattern if len(pattern) == num_layers else None


def keys_of_pattern(pattern: Sequence[int]) -> tuple[int, int] | None:
    """Return the values of ``model.moe_layer_freq`` and ``model.moe_first_dense_layers`` that give ``pattern``. Return
    None if no values give it. ``pattern`` has a 1 for each MoE layer and a 0 for each dense layer."""
    layers = range(1, len(pattern) + 1)
    for first in range(len(pattern)):
        for distance in layers:
            if list(pattern) == [int(layer > first and layer % distance == 0) for layer in layers]:
                return distance, first
    return None


def _moe_layer_freq(values: Sequence[str], given: Given) -> Computed:
    num_layers = _number(given, "num-layers")
    if values == ["1"]:
        return "key", ["model.moe_layer_freq=1"], ""
    if num_layers is None:
        return "none", (), "the layers can only be translated together with --num-layers"
    pattern = moe_pattern(values[0], num_layers)
    if pattern is None:
        return (
            "refused",
            (),
            f"must be a number n (every n-th layer is a MoE layer) or a list of {num_layers} numbers, one per layer",
        )
    if (found := keys_of_pattern(pattern)) is not None:
        return "key", [f"model.moe_layer_freq={found[0]}", f"model.moe_first_dense_layers={found[1]}"], ""
    note = (
        "MoE layers are layers n, 2n, ... counted from 1 (model.moe_layer_freq), except the first "
        "model.moe_first_dense_layers; there is no key for another pattern"
    )
    return "none", (), note


def _aux_loss(values: Sequence[str], given: Given) -> Computed:
    if len(values) > 1:
        return "none", (), "the router has one auxiliary loss with one weight (model.moe_aux_loss_coeff)"
    return "key", [f"model.moe_aux_loss_coeff={values[0]}"], ""


def _balancing(values: Sequence[str], given: Given) -> Computed:
    if len(values) > 1:
        return "none", (), "the router has one method of load balancing (model.moe_router_load_balancing_type)"
    return "key", [f"model.moe_router_load_balancing_type={values[0]}"], ""


_UNEVEN = (
    *("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers", "pipeline-model-parallel-layout"),
    *("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split"),
)


def _pipeline(values: Sequence[str], given: Given) -> Computed:
    num_layers, stages = _number(given, "num-layers"), int(values[0])
    if num_layers is not None and num_layers % stages:
        divisors = [n for n in range(2, num_layers) if num_layers % n == 0]
        possible = f"possible sizes: 1, {', '.join(map(str, [*divisors, num_layers]))}"
        return (
            "none",
            (),
            f"every stage holds the same number of layers, and {stages} does not divide {num_layers}; {possible}",
        )
    note = "this project gives every stage the same number of layers" if any(name in given for name in _UNEVEN) else ""
    return "key", [f"parallel.pipeline_model_parallel_size={stages}"], note


def _virtual_stages(values: Sequence[str], given: Given) -> Computed:
    num_layers, stages = _number(given, "num-layers"), _number(given, "pipeline-model-parallel-size") or 1
    if stages == 1 or values[0] == "1":
        return "always", (), "a pipeline stage holds one chunk of the model by default"
    if num_layers is not None and num_layers % (stages * int(values[0])):
        return "none", (), f"every chunk holds the same number of layers, and PP * VPP does not divide {num_layers}"
    return "key", [f"parallel.virtual_pipeline_model_parallel_size={values[0]}"], ""


def _layers_per_virtual_stage(values: Sequence[str], given: Given) -> Computed:
    num_layers, stages = _number(given, "num-layers"), _number(given, "pipeline-model-parallel-size")
    if num_layers is None or stages is None:
        return "none", (), "can only be translated together with --num-layers and --pipeline-model-parallel-size"
    if num_layers % (stages * int(values[0])):
        return "none", (), f"every chunk holds the same number of layers, and PP * L does not divide {num_layers}"
    return _virtual_stages([str(num_layers // (stages * int(values[0])))], given)


def _warmup_fraction(values: Sequence[str], given: Given) -> Computed:
    for unit, name in (("samples", "samples"), ("iterations", "iters")):
        decay = _number(given, f"lr-decay-{name}") or _number(given, f"train-{name}")
        if decay is not None:
            words = [f"optimizer.lr_warmup_{unit}={int(float(values[0]) * decay)}"]
            return "key", words, f"{values[0]} * {decay}"
    return "none", (), "can only be translated together with the length of the schedule or of the run"


def _timeout(values: Sequence[str], given: Given) -> Computed:
    return "key", [f"training.distributed_timeout_seconds={60 * float(values[0])}"], ""


def _reset_position_ids(values: Sequence[str], given: Given) -> Computed:
    is_rotary = given.get("position-embedding-type") == ["rope"] or "use-rotary-position-embeddings" in given
    if is_rotary or "multi-latent-attention" in given:
        return "always", (), "rotary positions act only by the distance of tokens; Megatron-LM ignores the flag"
    return "key", ["data.reset_position_ids=true"], ""


def _profile(values: Sequence[str], given: Given) -> Computed:
    # Megatron-LM counts steps from 0 and ends before --profile-step-end. The defaults of its two flags are 10 and 12.
    first, end = _number(given, "profile-step-start"), _number(given, "profile-step-end")
    first, end = 10 if first is None else first, 12 if end is None else end
    if end <= first:
        return "refused", (), "must have a --profile-step-end above --profile-step-start"
    words = [f"telemetry.profile_first_iteration={first + 1}", f"telemetry.profile_iterations={end - first}"]
    return "key", words, ""


def _profile_ranks(values: Sequence[str], given: Given) -> Computed:
    return "key", [f"telemetry.profile_ranks=[{','.join(values)}]"], ""


def _tensorboard(values: Sequence[str], given: Given) -> Computed:
    return "key", ["telemetry=tensorboard"], "event files are in the run's folder; needs the package tensorboard"


def _sources(split: str) -> Callable[[Sequence[str], Given], Computed]:
    """Return a function that translates a flag's paths and weights to ``data.<split>`` and ``data.<split>_weights``."""

    def convert(values: Sequence[str], given: Given) -> Computed:
        is_weighted = len(values) > 1 and len(values) % 2 == 0 and all(map(_NUMBER.fullmatch, values[::2]))
        paths, weights = (values[1::2], values[::2]) if is_weighted else (values, [])
        words = [f"data.{split}=[{','.join(map(grammar_value, paths))}]"]
        if len(paths) > 1:
            # Without weights, both Megatron-LM and the default null weight each source by its size.
            words += [f"data.{split}_weights=[{','.join(weights)}]"] if weights else []
        return "key", words, ""

    return convert


def _split(values: Sequence[str], given: Given) -> Computed:
    shares = [float(share) for share in values[0].replace("/", ",").split(",")]
    shares += [0.0] * (3 - len(shares))
    note = (
        f"{shares[2] / sum(shares):.2g} of the data were for a test split; they are used for training"
        if shares[2]
        else ""
    )
    return "key", [f"data.valid_fraction={shares[1] / sum(shares):.6g}"], note


def _tokenizer_type(values: Sequence[str], given: Given) -> Computed:
    if values[0] == "GPT2BPETokenizer":
        return "key", ["data=gpt2"], ""
    if values[0] == "HuggingFaceTokenizer":
        return "key", ["data=huggingface"], ""
    if values[0] == "Llama2Tokenizer":
        note = "the model's folder has the same tokenizer as tokenizer.json; data=sentencepiece reads the .model file"
        return "key", ["data=huggingface"], note
    if values[0] == "GPTSentencePieceTokenizer":
        return "key", ["data=sentencepiece"], "needs the package sentencepiece"
    note = (
        "tokenizers are bytes, GPT-2, .model files of SentencePiece and JSON files of the tokenizers library; tiktoken "
        "and WordPiece files must be converted to such a JSON file (data=huggingface data.tokenizer_file=FILE). "
        "SentencePieceTokenizer adds special tokens of its own; GPTSentencePieceTokenizer is data=sentencepiece"
    )
    return "none", (), note


def _tokenizer_model(values: Sequence[str], given: Given) -> Computed:
    kind, path = given.get("tokenizer-type", [""])[0], PurePath(values[0])
    if kind not in ("HuggingFaceTokenizer", "Llama2Tokenizer", "GPTSentencePieceTokenizer", ""):
        return "none", (), "the file cannot be read: data.tokenizer_file names a JSON file or a .model file"
    if path.suffix == ".json" or kind == "GPTSentencePieceTokenizer":
        return "key", [f"data.tokenizer_file={grammar_value(str(path))}"], ""
    beside = path.parent if path.suffix == ".model" else path
    note = "the JSON file of the same tokenizer, from the model's folder"
    return "key", [f"data.tokenizer_file={grammar_value(str(beside / 'tokenizer.json'))}"], note


def _run_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", text)[:128]


def _save(values: Sequence[str], given: Given) -> Computed:
    path = PurePath(values[0])
    words = [f"run.dir={grammar_value(str(path.parent))}", f"run.name={_run_name(path.name)}"]
    return "key", words, "checkpoints go to the folder checkpoints in the run's folder"


def _load(values: Sequence[str], given: Given) -> Computed:
    if list(given.get("save", ())) == list(values) and "finetune" not in given:
        return "key", ["run.resume=auto"], "the folder of --save: the run continues if it has saved state"
    key = "load_weights" if {"finetune", "no-load-optim"} & given.keys() else "load"
    note = "a folder of Megatron-LM is opened only with checkpoint.trust=true, because its metadata is pickle"
    return "key", [f"checkpoint.{key}={grammar_value(values[0])}"], note


def _finetune(values: Sequence[str], given: Given) -> Computed:
    if "load" in given:
        return "key", _load(given["load"], given)[1], "iteration and optimizer state start from the beginning"
    return "none", (), "needs --load, which becomes checkpoint.load_weights"


def _experiment_name(values: Sequence[str], given: Given) -> Computed:
    if "save" in given:
        return "none", (), "wandb shows the name of the run (run.name), which --save gives"
    return "key", [f"run.name={_run_name(values[0])}"], ""


_SPECIAL: dict[str, Callable[[Sequence[str], Given], Computed]] = {
    "rope-type": _rope_type,
    "rotary-scaling-factor": _rotary_scaling,
    "moe-layer-freq": _moe_layer_freq,
    "moe-aux-loss-coeff": _aux_loss,
    "moe-router-load-balancing-type": _balancing,
    "pipeline-model-parallel-size": _pipeline,
    "num-virtual-stages-per-pipeline-rank": _virtual_stages,
    "num-layers-per-virtual-pipeline-stage": _layers_per_virtual_stage,
    "distributed-timeout-minutes": _timeout,
    "lr-warmup-fraction": _warmup_fraction,
    "tensorboard-dir": _tensorboard,
    "profile": _profile,
    "profile-ranks": _profile_ranks,
    "reset-position-ids": _reset_position_ids,
    "data-path": _sources("train"),
    "train-data-path": _sources("train"),
    "valid-data-path": _sources("valid"),
    "split": _split,
    "tokenizer-type": _tokenizer_type,
    "tokenizer-model": _tokenizer_model,
    "exit-duration-in-mins": _exit_duration,
    "save": _save,
    "load": _load,
    "finetune": _finetune,
    "wandb-exp-name": _experiment_name,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Default:
    """Default of a flag in Megatron-LM that differs from the default of this project's key."""

    flags: tuple[str, ...]
    """Flags of Megatron-LM that replace this default. If the command line contains one, the default does not apply."""
    overrides: tuple[str, ...]
    applies: Callable[[Given], bool] = field(default=lambda given: True)


def _has_experts(given: Given) -> bool:
    return "num-experts" in given


def _is_fp16(given: Given) -> bool:
    return "fp16" in given


_POSITIONS = ("position-embedding-type", "use-rotary-position-embeddings")
_DEFAULTS = (
    _Default(flags=("wandb-exp-name",), overrides=("model.name=from_megatron",)),
    _Default(flags=_POSITIONS, overrides=("model.position_embedding_type=learned_absolute",)),
    _Default(flags=("normalization",), overrides=("model.normalization=LayerNorm",)),
    _Default(flags=("swiglu",), overrides=("model.gated_linear_unit=false", "model.activation=gelu")),
    _Default(flags=("disable-bias-linear",), overrides=("model.add_bias_linear=true",)),
    _Default(
        flags=("untie-embeddings-and-output-weights",),
        overrides=("model.untie_embeddings_and_output_weights=false",),
    ),
    _Default(flags=("hidden-dropout",), overrides=("model.hidden_dropout=0.1",)),
    _Default(flags=("attention-dropout",), overrides=("model.attention_dropout=0.1",)),
    _Default(flags=("num-experts",), overrides=("model.num_moe_experts=null", "model.moe_ffn_hidden_size=null")),
    _Default(flags=("moe-ffn-hidden-size",), overrides=("model.moe_ffn_hidden_size=null",), applies=_has_experts),
    _Default(flags=("moe-aux-loss-coeff",), overrides=("model.moe_aux_loss_coeff=0.0",), applies=_has_experts),
    _Default(flags=("moe-z-loss-coeff",), overrides=("model.moe_z_loss_coeff=null",)),
    _Default(
        flags=("kv-lora-rank",),
        overrides=("model.kv_lora_rank=32",),
        applies=lambda given: "multi-latent-attention" in given,
    ),
    _Default(flags=("use-distributed-optimizer",), overrides=("parallel.use_distributed_optimizer=false",)),
    _Default(flags=("min-lr",), overrides=("optimizer.min_lr=0.0",)),
    _Default(flags=("lr-decay-style",), overrides=("optimizer.lr_decay_style=linear",)),
    _Default(
        flags=("lr-warmup-iters", "lr-warmup-samples", "lr-warmup-fraction"),
        overrides=("optimizer.lr_warmup_iterations=0",),
        applies=lambda given: "train-samples" not in given,
    ),
    _Default(
        flags=("lr-warmup-samples", "lr-warmup-fraction"),
        overrides=("optimizer.lr_warmup_samples=0",),
        applies=lambda given: "train-samples" in given,
    ),
    _Default(flags=("weight-decay",), overrides=("optimizer.weight_decay=0.01",)),
    _Default(flags=("adam-beta2",), overrides=("optimizer.adam_beta2=0.999",)),
    _Default(
        flags=("accumulate-allreduce-grads-in-fp32",),
        overrides=("precision.grad_reduce_in_fp32=false",),
        applies=_is_fp16,
    ),
    _Default(flags=("initial-loss-scale",), overrides=("precision.initial_loss_scale=4294967296.0",), applies=_is_fp16),
    _Default(flags=("eval-interval",), overrides=("training.eval_interval_iterations=0",)),
    _Default(flags=("eval-iters",), overrides=("training.eval_iterations=100",)),
    _Default(flags=("split",), overrides=("data.valid_fraction=0.03",), applies=lambda given: "data-path" in given),
)


def _defaults(given: Given) -> list[Answer]:
    """Return overrides for flags that are not given and whose default differs between Megatron-LM and this project."""
    found = [
        Answer(given=f"--{each.flags[0]} is not given", kind="key", overrides=each.overrides)
        for each in _DEFAULTS
        if not set(each.flags) & given.keys() and each.applies(given)
    ]
    hidden = _number(given, "hidden-size")
    if "ffn-hidden-size" not in given and hidden is not None:
        width = 4 * hidden * 2 // 3 // 64 * 64 if "swiglu" in given else 4 * hidden
        words = (f"model.ffn_hidden_size={width}",)
        found.append(Answer(given="--ffn-hidden-size is not given", kind="key", overrides=words))
    ranks = _number(given, "tensor-model-parallel-size") or 1
    if ranks > 1 and _has_experts(given) and "expert-tensor-parallel-size" not in given:
        words = (f"parallel.expert_tensor_parallel_size={ranks}",)
        found.append(Answer(given="--expert-tensor-parallel-size is not given", kind="key", overrides=words))
    return found


def check_flags(words: Sequence[str]) -> None:
    """Refuse flags such as ``--num-layers`` on the command line of this project. The message translates each flag.

    Raises:
        ConfigError: ``words`` contains a flag.
    """
    given, _ = _parse([word for word in words if word.startswith("--") or "=" not in word])
    lines = [
        _answer(name, values, given).sentence()
        if name in flags()
        else str(flag_error(f"--{'='.join([name, *values])}"))
        for name, values in given.items()
        if name
    ]
    if lines:
        raise ConfigError("\n".join(lines))
    for word in words:
        if word.startswith("-"):
            raise flag_error(word)
