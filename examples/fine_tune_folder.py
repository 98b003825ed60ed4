"""Fine-tunes a Hugging Face folder on two stages: `python examples/fine_tune_folder.py FOLDER TEXT [field=value ...]`.

The model, its first weights and its tokenizer come from FOLDER, the text from a file or a folder. The
result becomes a Hugging Face folder again, FOLDER-tuned.
"""

import json
import subprocess
import sys
from pathlib import Path

import parallel3d


def convert(*arguments):
    command = [sys.executable, "-m", "parallel3d", "convert", *map(str, arguments)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    folder, text, overrides = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    has_tokenizer = any(folder.glob("tokenizer.*")) or (folder / "vocab.json").exists()
    config = {
        "model": json.loads(convert("model", folder))["model"],
        "parallel": {"pp_size": 2},
        "batch": {"global_batch_size": 8, "micro_batch_size": 1, "sequence_length": 128},
        "optimizer": {"learning_rate": 1e-4},
        "lr_schedule": {"warmup_steps": 10},
        "data": {"sources": [text], "tokenizer": {"path": folder if has_tokenizer else None}},
        "run": {"num_steps": 100, "initialize_from": folder, "directory": f"runs/{folder.name}"},
    }
    result = parallel3d.train(config, overrides)
    print(f"loss {result.metrics[0]['loss']:.3f} -> {result.final_loss:.3f}")
    print(convert("to-hf", result.checkpoints[-1], folder.with_name(f"{folder.name}-tuned")))
