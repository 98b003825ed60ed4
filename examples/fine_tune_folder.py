"""Fine-tunes a Hugging Face folder on chats, on two stages:

    python examples/fine_tune_folder.py FOLDER CHATS [field=value ...]

The model, its first weights, its tokenizer and its chat template (ChatML if it has none) come from FOLDER. CHATS is a
file of JSON lines, each {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]};
only what the assistant says is learned. One chat in twenty is for validation: training stops when the loss of those has
not fallen for two evaluations, and the weights of the best evaluation become a Hugging Face folder again, FOLDER-tuned.
"""

import json
import subprocess
import sys
from pathlib import Path

import parallel3d


def convert(*arguments):
    command = [sys.executable, "-m", "parallel3d", "convert", *map(str, arguments)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def has_template(folder):
    settings = folder / "tokenizer_config.json"
    return settings.exists() and ("chat_template" in settings.read_text() or (folder / "chat_template.jinja").exists())


if __name__ == "__main__":
    folder, chats, overrides = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    has_tokenizer = any(folder.glob("tokenizer.*")) or (folder / "vocab.json").exists()
    config = {
        "model": json.loads(convert("model", folder))["model"],
        "parallel": {"pp_size": 2},
        "batch": {"global_batch_size": 8, "micro_batch_size": 1, "sequence_length": 128},
        "optimizer": {"learning_rate": 1e-4},
        "lr_schedule": {"warmup_steps": 10},
        "data": {
            "sources": [chats],
            "chat": {"template": folder if has_template(folder) else "chatml"},
            "validation_fraction": 0.05,
            "document_mask": True,  # chats share a sequence without seeing each other
            "tokenizer": {"path": folder if has_tokenizer else None},
        },
        "checkpoint": {"every": 10},  # where it is evaluated, so that the best weights are kept
        "run": {
            "num_steps": 100,
            "evaluate_every": 10,
            "initialize_from": folder,
            "directory": f"runs/{folder.name}",
        },
    }
    result = parallel3d.train(config, overrides, callbacks=[parallel3d.EarlyStopping(patience=2)])
    learned = sum(step["num_loss_tokens"] for step in result.metrics)
    print(f"loss {result.metrics[0]['loss']:.3f} -> {result.final_loss:.3f}, of {learned:,} tokens of replies")
    print(convert("to-hf", result.best_checkpoint, folder.with_name(f"{folder.name}-tuned")))
