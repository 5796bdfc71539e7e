"""A GGUF file made into a Hugging Face style folder: config, tokenizer and bfloat16 weights."""

from pathlib import Path

from services.common.models.files import Progress, no_progress, write_checksums, write_json
from services.common.models.gguf_config import generation_config, model_config
from services.common.models.gguf_file import GGUFFile
from services.common.models.gguf_tokenizer import tokenizer_config, tokenizer_from_gguf
from services.common.models.gguf_weights import read_weights, weights_of
from services.common.models.safetensors_writer import write_bfloat16


def import_gguf(source: Path, folder: Path, progress: Progress = no_progress) -> None:
    """Write the model of `source` into `folder`.

    Everything that could be refused is looked at before the first weight is read. Not atomic: `folder` is a staging folder.

    Args:
        source: the GGUF file; memory use does not grow with its size.
        folder: an empty folder.
        progress: called with ("import", bytes read, bytes in all).
    Raises:
        ModelError: the model needs a piece that Baton does not have; the message names it.
        ConfigError: the file is missing or damaged.
    """
    file = GGUFFile(source)
    config = model_config(file)
    weights = weights_of(file, config)
    tokenizer = tokenizer_from_gguf(file)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", generation_config(file))
    write_json(folder / "tokenizer_config.json", tokenizer_config(file, config["max_position_embeddings"]))
    tokenizer.save(str(folder / "tokenizer.json"))
    chunks = read_weights(file, weights, config["head_dim"], progress)
    write_bfloat16(folder / "model.safetensors", {weight.hf_name: weight.shape for weight in weights}, chunks)
    write_checksums(folder)
