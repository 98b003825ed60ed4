"""A run that fits a notebook, cell by cell: half a minute on two CPU cores, nothing downloaded.

Paste it into a notebook as it is: the workers are processes of their own, so the notebook may hold torch and threads.
"""

# %% a configuration is a dict; what it leaves out has defaults
import parallel3d

config = {
    "model": {
        "vocab_size": 257,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "parallel": {"pp_size": 2},
    "batch": {"global_batch_size": 8, "micro_batch_size": 2, "sequence_length": 128},
    "optimizer": {"learning_rate": 3e-3},
    "data": {"tokenizer": {"kind": "bytes"}},
    "run": {"num_steps": 60, "threads_per_rank": 1, "directory": "runs/notebook"},
}


# %% callbacks run here, in the notebook, while the workers go on
class Watch(parallel3d.Callback):
    """Prints, and ends the run once the loss is low enough."""

    def on_evaluation(self, line):
        print(f"evaluation at step {line['step']}: {line['loss']:.3f}")

    def on_step(self, line):
        if line["step"] % 20 == 0:
            print(f"step {line['step']}: {line['loss']:.3f}")
        if line["loss"] < 1.0:
            raise parallel3d.StopTraining


if __name__ == "__main__":  # a notebook does not need this line, a script does
    result = parallel3d.train(config, callbacks=[Watch()], quiet=True)

    # %% the result reads the run folder
    losses = [line["loss"] for line in result.metrics]
    print(f"{result.final_step} steps, loss {losses[0]:.2f} -> {result.final_loss:.2f}, files in {result.run_folder}")
