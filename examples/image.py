"""Answer a question about an image: the vision tower of Mistral Small 3 or Ministral 3 runs in transformers, the text decoder here.

python examples/image.py FOLDER IMAGE "What is this?"
"""

import sys

import torch
from transformers import AutoConfig, AutoProcessor, Mistral3ForConditionalGeneration

import trt_kvcache


def image_rows(folder, inputs):
    """Return the rows of the images in the inputs of a model: float32 ``[n, hidden_size]``."""
    config = AutoConfig.from_pretrained(folder)
    config.text_config.num_hidden_layers = 1  # transformers runs no text here
    tower = Mistral3ForConditionalGeneration.from_pretrained(folder, config=config, dtype="auto").model
    pixels = inputs["pixel_values"].to(tower.dtype)
    with torch.inference_mode():
        features = tower.get_image_features(pixels, image_sizes=inputs["image_sizes"]).pooler_output
    return torch.cat(features).float().numpy()


def answer(folder, inputs, image_token_id, **options):
    """Return the answer to a prompt with images."""
    features = image_rows(folder, inputs)
    with trt_kvcache.load(folder, max_embeddings=len(features)) as session:
        rows = iter(session.add_embeddings(features))
        prompt = [next(rows) if token == image_token_id else token for token in inputs["input_ids"][0].tolist()]
        return list(session.generate([prompt], **options))


if __name__ == "__main__":
    model, image, question = sys.argv[1:]
    processor = AutoProcessor.from_pretrained(model)
    content = [{"type": "image", "path": image}, {"type": "text", "text": question}]
    messages = [{"role": "user", "content": content}]
    inputs = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt")
    print("".join(token.text for token in answer(model, inputs, processor.image_token_id, max_new_tokens=200)))
