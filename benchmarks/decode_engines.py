"""Tokens per second of one sequence: transformers, this package's packed layers, and llama.cpp, in turns.

    python -m benchmarks.decode_engines EXPORT --packed PACKED INT8 --gguf FILE.gguf … --rounds 5 --json F.json

EXPORT is a 2:4 directory, PACKED and INT8 what `pack` makes of it, each FILE what llama.cpp's `convert_hf_to_gguf.py`
does. Every engine continues the same prompt greedily; pruned weights are zeros to llama.cpp, which takes as long for
them as for others. Needs llama-cpp-python for GGUF files.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel

from benchmarks.speed.generation import GenerationConfig, generate
from benchmarks.speed.timing import BufferRead, results_in_turns, seconds
from roi_lightning.contrib.packed import accelerate, from_packed
from roi_lightning.utils.atomic_io import write_json
from roi_lightning.utils.tables import print_table


@dataclass(frozen=True)
class Timed:
    """One engine, once.

    Attributes:
        prefill_s: Seconds for the prompt and the first token.
        decode_s: Seconds for the others.
        tokens: All new ones.
    """

    prefill_s: float
    decode_s: float
    tokens: list[int]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    args = build_parser().parse_args(argv)
    prompt = torch.randint(100, 40_000, (1, args.prompt), generator=torch.Generator().manual_seed(0))
    read = BufferRead()
    engines: dict[str, Callable[[], Any]] = {
        "memory": partial(seconds, read),
        **transformers_engines(args, prompt),
        **{file.name: llama_cpp_engine(file, prompt, args.tokens) for file in args.gguf},
    }
    results = results_in_turns(engines, args.rounds, "decoding")
    bandwidth = read.nbytes / median(results.pop("memory"))
    report(results, args, bandwidth)


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("export", help="a 2:4 directory")
    parser.add_argument("--packed", nargs="*", default=[], help="packed directories of it")
    parser.add_argument("--gguf", nargs="*", type=Path, default=[], help="GGUF files of it")
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--tokens", type=int, default=128, help="new ones")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    return parser


def transformers_engines(args: argparse.Namespace, prompt: Tensor) -> dict[str, Callable[[], Timed]]:
    """The dense model, packed layers in the model's own blocks, and packed directories as they are loaded."""
    dense = AutoModelForCausalLM.from_pretrained(args.export, dtype=torch.bfloat16).eval()
    unfused = deepcopy(dense)
    accelerate(unfused)
    unfused.model.__class__ = type(dense.model)
    models = {"transformers, dense": dense, "packed, the model's own blocks": unfused}
    models |= {f"{Path(name).name}, fused": from_packed(name, "bfloat16") for name in args.packed}
    config = GenerationConfig(args.tokens)
    return {name: partial(timed, lm, prompt, config) for name, lm in models.items()}


def timed(lm: PreTrainedModel, prompt: Tensor, config: GenerationConfig) -> Timed:
    """Once through `generate`."""
    made = generate(lm, prompt, config)
    return Timed(made.prefill_s, made.decode_s, made.tokens[0].tolist())


def llama_cpp_engine(file: Path, prompt: Tensor, count: int) -> Callable[[], Timed]:
    """A GGUF file in as many threads as torch has."""
    import llama_cpp

    threads, length = torch.get_num_threads(), prompt.shape[1] + count
    llm = llama_cpp.Llama(
        str(file), n_ctx=length, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False
    )

    def run() -> Timed:
        llm.reset()
        started, tokens = perf_counter(), prompt[0].tolist()
        llm.eval(tokens)
        new = [best_token(llm)]
        first = perf_counter()
        while len(new) < count:
            llm.eval(new[-1:])
            new.append(best_token(llm))
        return Timed(first - started, perf_counter() - first, new)

    return run


def best_token(llm: Any) -> int:
    """The greedy choice after what was read last."""
    import llama_cpp

    logits = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
    return int(np.ctypeslib.as_array(logits, shape=(llm.n_vocab(),)).argmax())


def report(results: Mapping[str, Sequence[Timed]], args: argparse.Namespace, bandwidth: float) -> None:
    """Print the table, and write it."""
    rows, facts = [], {"bandwidth_bytes_per_s": bandwidth, "threads": torch.get_num_threads()}
    first = next(iter(results.values()))[0].tokens
    for name, runs in results.items():
        prefill = args.prompt / median(run.prefill_s for run in runs)
        rates = sorted((args.tokens - 1) / run.decode_s for run in runs)
        same = next(
            (i for i, pair in enumerate(zip(first, runs[0].tokens, strict=True)) if len({*pair}) > 1), None
        )
        spread = (rates[-1] - rates[0]) / median(rates)
        rows.append(
            [
                name,
                f"{prefill:,.0f}",
                f"{median(rates):.1f}",
                f"{spread:.0%}",
                "all" if same is None else str(same),
            ]
        )
        facts[name] = {"prefill_tokens_per_s": prefill, "decode_tokens_per_s": rates, "same_tokens": same}  # type: ignore[assignment]
    print_table(["", "prefill/s", "tokens/s", "spread", "as dense"], rows)
    print(f"reading a large buffer: {bandwidth / 1e9:.1f} GB/s")
    if args.json:
        write_json(args.json, facts)


if __name__ == "__main__":
    main()
