"""What each format of quantized weights costs beside 16 bits: perplexities on a CPU.

    python benchmarks/perplexity.py [--out benchmarks/results/perplexity.json] [--engine torch] [--tokens 512]

The shipped model predicts the text that it was trained on. A random model of four layers and 53 million weights predicts texts that it
drew itself in 16 bits: there 16 bits are the best that is possible, and what a format adds is its distance from them. Random weights have
no redundancy, so that it is larger than for a trained model. Rounded are the linear layers of the decoder, to nearest, without calibration.
It needs the ``gguf`` package.
"""

import argparse
import json
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
from environment import describe_environment, to_table, write_result
from safetensors.numpy import load_file

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.helpers import quantized_models as made
from tests.helpers.gguf_files import write_gguf_file
from trt_kvcache import InferenceSession, perplexity, text_perplexity
from trt_kvcache.checkpoint.checkpoint import COMPANION_FILES
from trt_kvcache.doctor.random_model import write_random_model

SHIPPED = Path(__file__).parent.parent / "examples" / "tiny-llama"

#: Heads of 64, inputs that are whole groups of 128.
RANDOM = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

#: Logits are multiplied with it, so that they are as sharp as those of trained models.
HEAD_FACTOR = 2.0

#: Texts that the random model draws.
TEXTS = 4

ROUNDED = ("int8", "int8,embedding=int8,head=int8", "int4:32", "int4:128", "int4:32,embedding=int8,head=int8")


def whole(quantize, group):
    """Return how libraries that have no smaller last group store a matrix: as it is, in 16 bits, where inputs are not whole groups."""

    def of(weight, random):
        return quantize(weight, random) if weight.shape[1] % group == 0 else ({"weight": weight.astype(np.float16)}, weight)

    return of


#: Checkpoints, rounded to nearest as their libraries store them. The types of GGUF are those of llama.cpp.
CHECKPOINTS = {
    "GPTQ int8 with zero points, groups of 128": (made.gptq(bits=8, group_size=128), {**made.GPTQ_CONFIG, "bits": 8, "group_size": 128}),
    "GPTQ or AWQ int4 with zero points, groups of 32": (made.gptq(group_size=32), {**made.GPTQ_CONFIG, "group_size": 32}),
    "GPTQ or AWQ int4 with zero points, groups of 128": (made.gptq(group_size=128), {**made.GPTQ_CONFIG, "group_size": 128}),
    "compressed-tensors int4 (W4A16), groups of 32": (made.symmetric(32), made.in_groups_of(32, made.CT_INT4)),
    "compressed-tensors int4 (W4A16), groups of 128": (made.symmetric(128), made.in_groups_of(128, made.CT_INT4)),
    "ModelOpt int4 (W4A16_AWQ without factors), groups of 32": (
        whole(made.modelopt_int4(32, factors=False), 32),
        made.modelopt("W4A16_AWQ", group_size=32),
    ),
    "FP8, a scale for each output": (made.floats(1, None), made.CT_FP8),
    "FP8, a scale for each matrix": (made.floats(None, None, scalar=True), made.modelopt("FP8")),
    "FP8, blocks of 128 x 128": (made.fp8_blocks(block=(128, 128)), {**made.FP8_CONFIG, "weight_block_size": [128, 128]}),
    "NVFP4": (whole(made.FP4_CASES["modelopt-nvfp4"][0], 16), made.FP4_CASES["modelopt-nvfp4"][1]),
    "MXFP4": (whole(made.FP4_CASES["mxfp4"][0], 32), made.FP4_CASES["mxfp4"][1]),
    "GGUF Q8_0": "Q8_0",
    "GGUF Q4_0": "Q4_0",
}


def session_of(model, engine, **options):
    """Open a session that scores."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # activations are not quantized
        chunk = min(64, options.get("max_sequence_length", 64))
        return InferenceSession.from_model(model, engine=engine, max_logits_per_slot=chunk, **options)


def write_gguf(folder, model, kind):
    """Write a model as one GGUF file, its linear layers of a type where inputs are whole blocks of 32, all else in 16 bits."""
    folder.mkdir()
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    tensors, half = load_file(model / "model.safetensors"), "F16" if config.get("dtype") == "float16" else "BF16"
    types = {name: kind if "layers" in name and array.shape[-1] % 32 == 0 else half for name, array in tensors.items()}
    heads = config["num_attention_heads"], config["num_key_value_heads"]
    write_gguf_file(folder / "model.gguf", tensors, types, heads=heads)
    shutil.copy(model / "config.json", folder)


def formats_of(place, model):
    """Yield what rows are called, and folders and ``quantize=`` of the formats of a model; the first is the model itself."""
    yield None, model, None
    for quantize in ROUNDED:
        yield quantize, model, quantize
    for index, (label, how) in enumerate(CHECKPOINTS.items()):
        folder = place / f"checkpoint-{index}"
        if isinstance(how, str):
            write_gguf(folder, model, how)
        else:
            made.write_quantized(folder, str(model), how[0], {**how[1], "of": label})
        for name in COMPANION_FILES:
            if (model / name).is_file():
                shutil.copy(model / name, folder)
        yield label, folder, None
        shutil.rmtree(folder)


def shipped(engine, place):
    """Return the rows of the shipped model, whose head is its embedding."""
    text = (SHIPPED / "text.txt").read_text(encoding="utf-8")
    for label, folder, quantize in formats_of(place, SHIPPED):
        with session_of(folder, engine, quantize=quantize and quantize.removesuffix(",head=int8")) as session:
            found = text_perplexity(session, text, window=256)
            row = {"format": label or session.weights.format, "perplexity": found.perplexity, "weights_nbytes": session.weights.nbytes}
        print(json.dumps(row), flush=True)
        yield row


def drawn(engine, model, tokens):
    """Return texts that a model draws."""
    with session_of(model, engine, max_batch_size=TEXTS, max_sequence_length=tokens + 1) as session:
        prompts = [[17 * (index + 1)] for index in range(TEXTS)]
        texts = [list(prompt) for prompt in prompts]
        for event in session.generate(prompts, max_new_tokens=tokens, temperature=1.0, seed=0, ignore_eos=True):
            texts[event.index].append(event.token)
        return texts


def of_texts(engine, place, model, texts):
    """Return the rows of the random model."""
    for label, folder, quantize in formats_of(place, model):
        with session_of(folder, engine, max_batch_size=TEXTS, max_sequence_length=len(texts[0]), quantize=quantize) as session:
            label = label or session.weights.format
            row = {"format": label, "perplexity": perplexity(session.score(texts)), "weights_nbytes": session.weights.nbytes}
        print(json.dumps(row), flush=True)
        yield row


def main():
    """Measure, print, write the file."""
    parser = argparse.ArgumentParser(description="The cost of quantized weights")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "perplexity.json")
    parser.add_argument("--engine", choices=("reference", "torch"), default="torch")
    parser.add_argument("--tokens", type=int, default=512, help="of each text that the random model draws")
    parser.add_argument("--layers", type=int, default=RANDOM["num_hidden_layers"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trt_kvcache-") as name:
        place = Path(name)
        small = list(shipped(arguments.engine, place))
        config = {**RANDOM, "num_hidden_layers": arguments.layers}
        model = write_random_model(place / "model", config, head_factor=HEAD_FACTOR)
        texts = drawn(arguments.engine, model, arguments.tokens)
        large = list(of_texts(arguments.engine, place, model, texts))
    content = {
        **describe_environment(),
        "engine": arguments.engine,
        "model": config,
        "head_factor": HEAD_FACTOR,
        "scored_tokens": sum(len(one) - 1 for one in texts),
        "shipped": to_table(small),
        "random": to_table(large),
    }
    write_result(arguments.out, content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
