"""What each format of quantized weights costs beside 16 bits: perplexities on a CPU.

    python benchmarks/perplexity.py [--out benchmarks/results/perplexity.json] [--engine torch] [--tokens 512]

The shipped model predicts the text that it was trained on. A random model of four layers and 53 million weights predicts texts that it
drew itself in 16 bits: there 16 bits are the best that is possible, and what a format adds is its distance from them. Random weights have
no redundancy, so that it is larger than for a trained model. Rounded are the linear layers of the decoder, to nearest, without calibration.
"""

import argparse
import json
import sys
import tempfile
import warnings
from pathlib import Path

from environment import describe_environment, to_table, write_result
from random_model import write_random_model

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.helpers import quantized_models as made
from trt_kvcache import InferenceSession, perplexity, text_perplexity

SHIPPED = Path(__file__).parent.parent / "examples" / "tiny-llama"

#: Heads of 64, inputs that are whole groups of 128; the divisor of logits makes them as sharp as those of trained models.
RANDOM = {
    "model_type": "granite",
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "attention_multiplier": 0.125,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 0.5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

#: Texts that the random model draws.
TEXTS = 4

ROUNDED = ("int8", "int8,embedding=int8,head=int8", "int4:32", "int4:128", "int4:32,embedding=int8,head=int8")

#: Checkpoints, rounded to nearest as their libraries store them.
CHECKPOINTS = {
    "GPTQ or AWQ int4 with zero points, groups of 32": (made.awq(group_size=32), {**made.AWQ_CONFIG, "group_size": 32}),
    "GPTQ or AWQ int4 with zero points, groups of 128": (made.awq(group_size=128), {**made.AWQ_CONFIG, "group_size": 128}),
    "FP8, a scale for each output": (made.floats(1, None), made.CT_FP8),
    "FP8, blocks of 128 x 128": (made.fp8_blocks(block=(128, 128)), {**made.FP8_CONFIG, "weight_block_size": [128, 128]}),
    "NVFP4": made.FP4_CASES["modelopt-nvfp4"],
    "MXFP4": made.FP4_CASES["mxfp4"],
}


def session_of(model, engine, **options):
    """Open a session that scores."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # activations are not quantized
        chunk = min(64, options.get("max_sequence_length", 64))
        return InferenceSession.from_model(model, engine=engine, max_logits_per_slot=chunk, **options)


def shipped(engine, text, quantize):
    """Return a row of the shipped model."""
    with session_of(SHIPPED, engine, quantize=quantize) as session:
        found = text_perplexity(session, text, window=256)
        return {"format": quantize or session.weights.format, "perplexity": found.perplexity, "weights_nbytes": session.weights.nbytes}


def drawn(engine, model, tokens):
    """Return texts that a model draws."""
    with session_of(model, engine, max_batch_size=TEXTS, max_sequence_length=tokens + 1) as session:
        prompts = [[17 * (index + 1)] for index in range(TEXTS)]
        texts = [list(prompt) for prompt in prompts]
        for event in session.generate(prompts, max_new_tokens=tokens, temperature=1.0, seed=0, ignore_eos=True):
            texts[event.index].append(event.token)
        return texts


def of_texts(engine, model, texts, label, quantize=None):
    """Return a row of the random model."""
    with session_of(model, engine, max_batch_size=TEXTS, max_sequence_length=len(texts[0]), quantize=quantize) as session:
        row = {"format": label, "perplexity": perplexity(session.score(texts)), "weights_nbytes": session.weights.nbytes}
    print(json.dumps(row), flush=True)
    return row


def main():
    """Measure, print, write the file."""
    parser = argparse.ArgumentParser(description="The cost of quantized weights")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "perplexity.json")
    parser.add_argument("--engine", choices=("reference", "torch"), default="torch")
    parser.add_argument("--tokens", type=int, default=512, help="of each text that the random model draws")
    parser.add_argument("--layers", type=int, default=RANDOM["num_hidden_layers"])
    arguments = parser.parse_args()
    text = (SHIPPED / "text.txt").read_text(encoding="utf-8")
    small = [shipped(arguments.engine, text, quantize) for quantize in (None, "int8", "int8,embedding=int8")]
    with tempfile.TemporaryDirectory(prefix="trt_kvcache-") as place:
        model = write_random_model(Path(place) / "model", {**RANDOM, "num_hidden_layers": arguments.layers})
        texts = drawn(arguments.engine, model, arguments.tokens)
        large = [of_texts(arguments.engine, model, texts, RANDOM["torch_dtype"])]
        large += [of_texts(arguments.engine, model, texts, quantize, quantize) for quantize in ROUNDED]
        for index, (label, (quantize, config)) in enumerate(CHECKPOINTS.items()):
            folder = Path(place) / f"checkpoint-{index}"
            made.write_quantized(folder, str(model), quantize, {**config, "of": label})
            large.append(of_texts(arguments.engine, folder, texts, label))
    content = {
        **describe_environment(),
        "engine": arguments.engine,
        "model": {**RANDOM, "num_hidden_layers": arguments.layers},
        "scored_tokens": sum(len(one) - 1 for one in texts),
        "shipped": to_table(small),
        "random": to_table(large),
    }
    write_result(arguments.out, content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
