"""Every command that pages show in blocks of code: how a test runs it, or why none does.

`ran` is run as it is printed by tests/test_documented_commands.py, in a folder that holds a short run and what users
would bring (tests/support/workshop.py): `given` links further names that the command uses to things there, `typed`
stands for the notation of usage lines ([--option VALUE]), `added` are overrides that shorten it. `resolved` is run with
--print-config: every field of it is read and checked, nothing trains. `not_run` says why, and which test runs the same
thing; its options are parsed all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tests.support.page_commands import DocumentedCommand, not_run, ran, resolved

TINY_MODEL = "model.hidden_size=16 model.intermediate_size=32 model.num_attention_heads=2 model.vocab_size=300"
TINY_TEXT = "batch.sequence_length=32 'data.sources=[\"my_text.txt\"]' run.directory=runs/tiny"
SHORT_RUN = (
    f"{TINY_MODEL} batch.sequence_length=32 run.num_steps=6 run.evaluate_every=2 run.evaluate_batches=1 "
    "checkpoint.every=2 'debug.dump_tensors={\"steps\": [3]}' monitor.charts=false data.validation_fraction=0.1"
)
ONE_THREAD = "--threads 1"
SHORT_TEXTS = "--threads 1 --max-tokens 8"
SUITE = "it is the test suite, or contains it"
MINUTES = "it takes minutes"
QUIET = "its figures need minutes of an idle machine"
RUNS_OF_ITS_OWN = "it trains several times"
CHANGED_TREE = "it needs the changes to the tree that the page describes"
GPU = "it needs a GPU"
HUB = "it downloads from a hub"

DOCUMENTED: Mapping[str, tuple[DocumentedCommand, ...]] = MappingProxyType(
    {
        "README.md": (
            not_run("make demo", MINUTES, "tests/launch/test_killed_processes.py"),
            not_run("make train", MINUTES, "tests/launch/test_train.py"),
            not_run("make test", SUITE),
            ran(
                "parallel3d train --config quickstart 'data.sources=[\"my_text.txt\"]' run.num_steps=200",
                "written to runs/quickstart",
                added=SHORT_RUN,
            ),
            resolved("parallel3d train --config quickstart parallel.tp_size=2 parallel.dp_size=1"),
            not_run(
                "torchrun --standalone --nproc_per_node 4 -m parallel3d train --config quickstart",
                "a launcher starts four processes",
                "tests/launch/test_launchers.py",
            ),
            ran("parallel3d plan --config quickstart --lost 3", "rank 3 (pp1 dp1 tp0): lost"),
            not_run(
                "parallel3d train --config quickstart run.num_steps=2000 &",
                "a worker of it is killed by hand",
                "tests/launch/test_installed.py",
            ),
        ),
        "CONTRIBUTING.md": (
            not_run("make lint", SUITE),
            not_run("make test", SUITE),
            not_run("make test-all", SUITE),
            not_run("make docs", "a test builds the same site", "tests/test_site.py"),
            not_run("make test-clients", SUITE),
            not_run(".ci/run", SUITE),
        ),
        "benchmarks/README.md": (
            not_run(
                "python benchmarks/cpu.py --rounds 3 --steps 6 --out build/cpu.json", QUIET, "tests/test_benchmarks.py"
            ),
            not_run("python benchmarks/plan_accuracy.py --rounds 1 --out build/plan_accuracy.json", QUIET),
            not_run("python benchmarks/under_load.py --minutes 10 --factor 3", QUIET),
            not_run("python benchmarks/start_timing.py --turns 5", QUIET),
            not_run("python benchmarks/door.py --text FILE --turns 5", QUIET),
            not_run("python benchmarks/drop_in.py --pairs 8 --block 3", QUIET),
            not_run("python benchmarks/checkpoint.py --out build/checkpoint.json", QUIET),
            not_run(
                "python benchmarks/tokenizer_speed.py [--text FILE] [--vocab-size 4096]",
                QUIET,
                typed="python benchmarks/tokenizer_speed.py --text FILE --vocab-size 4096",
            ),
            not_run("python benchmarks/conversion.py", QUIET),
            not_run("python benchmarks/uploads.py", QUIET),
            not_run(
                "python benchmarks/generation.py [--width 512] [--dtype bf16] [--texts 8]",
                QUIET,
                typed="python benchmarks/generation.py --width 512 --dtype bf16 --texts 8",
            ),
            not_run("python benchmarks/sources.py --size-mb 4000", QUIET),
            not_run("python benchmarks/device_plan.py --devices H100,H200", QUIET, "tests/test_device_budget.py"),
            not_run("python benchmarks/gpu.py --out visit", QUIET, "tests/test_gpu_visit.py"),
        ),
        "docs/checkpoints.md": (
            resolved("python launch/train.py --config FILE checkpoint.every=500 run.resume=auto"),
            resolved(
                "python launch/train.py --config FILE checkpoint.every=500 run.resume=auto "
                "checkpoint.upload=s3://bucket/runs/name",
                "s3://bucket/runs/name",
            ),
            not_run(
                "python launch/train.py --config FILE --preflight", RUNS_OF_ITS_OWN, "tests/launch/test_preflight.py"
            ),
            not_run("python launch/preflight.py --config FILE", RUNS_OF_ITS_OWN, "tests/launch/test_preflight.py"),
            ran(
                "python launch/average.py --last 2 --checkpoints runs/NAME/checkpoints --out runs/NAME/mean",
                "runs/NAME/mean",
            ),
            ran("python launch/average.py runs/A/checkpoints/best runs/B/checkpoints/latest --out mean", "mean"),
            ran(
                "python launch/convert.py to-hf runs/quickstart FOLDER [--dtype bf16] [--max-file-gb 5] "
                "[--tokenizer PATH]",
                "model.safetensors",
                typed="python launch/convert.py to-hf runs/quickstart FOLDER --dtype bf16 --max-file-gb 5 --tokenizer "
                "PATH",
                PATH="my_llama",
            ),
            ran(
                "python launch/convert.py from-hf FOLDER CHECKPOINT [--dtype fp32]",
                "written to CHECKPOINT",
                typed="python launch/convert.py from-hf FOLDER CHECKPOINT --dtype fp32",
                FOLDER="my_llama",
            ),
            ran("python launch/convert.py model FOLDER", '"model": {', FOLDER="my_llama"),
            ran(
                "python launch/convert.py config FOLDER [TEXT ...] [--tokens N]",
                '"num_tokens": 12345',
                typed="python launch/convert.py config FOLDER my_text.txt test.py --tokens 12345",
                FOLDER="my_llama",
            ),
            ran("parallel3d convert to-safetensors runs/quickstart OUT", "written to OUT"),
        ),
        "docs/debugging.md": (
            ran(
                'python launch/verify.py --config configs/quickstart.json --layouts "tp2.pp2.dp2,pp4.gpipe" --steps 2',
                "pp4",
                added=f"{TINY_MODEL} {TINY_TEXT}",
            ),
            resolved("python launch/train.py --config FILE 'debug.dump_tensors={\"steps\": [3]}'"),
            ran(
                "python launch/compare_dumps.py runs/here/dumps runs/there/dumps --tolerance 1e-5",
                "tensors in both dumps",
            ),
            resolved("python launch/train.py --config FILE debug.replica_check_every=100"),
            resolved('python launch/train.py --config FILE \'debug.profile={"steps": [10, 12], "ranks": [0]}\''),
            resolved(
                "python launch/train.py --config configs/quickstart.json "
                '\'elastic.faults=[{"rank": 3, "step": 7, "phase": "backward"}]\''
            ),
        ),
        "docs/devices.md": (
            not_run("python benchmarks/gpu.py --out visit", GPU, "tests/test_gpu_visit.py"),
            not_run("python benchmarks/gpu.py --out visit hlat_7b profiles", GPU, "tests/test_gpu_visit.py"),
            not_run("python benchmarks/gpu.py --out visit --smoke --device cpu", MINUTES, "tests/test_gpu_visit.py"),
            resolved(
                "python launch/train.py --config configs/quickstart.json run.device=cuda parallel.tp_size=1 "
                "parallel.pp_size=1 parallel.dp_size=1",
                '"device": "cuda"',
            ),
        ),
        "docs/architecture.md": (
            not_run(
                "python launch/train.py torchrun (deepspeed, srun, mpirun)",
                "it is part of a drawing",
                typed="python launch/train.py --config quickstart",
            ),
        ),
        "docs/elastic.md": (
            not_run("make demo", MINUTES, "tests/launch/test_killed_processes.py"),
            not_run("make kill-matrix", MINUTES, "tests/trainer/test_kill_processes.py"),
            resolved("python launch/train.py --config FILE checkpoint.every=500 restart.max_restarts=100"),
            resolved("python launch/train.py --config FILE elastic.balance=true"),
            resolved(
                "python launch/train.py --config FILE "
                '\'elastic.faults=[{"rank": 3, "step": 7, "phase": "backward", "kind": "kill"}]\''
            ),
            resolved(
                "python launch/train.py --config FILE "
                '\'elastic.random_faults={"probability": 0.001, "seed": 1, "max_faults": 3}\''
            ),
        ),
        "docs/launchers.md": (
            not_run(
                "srun python launch/train.py --config FILE run.resume=auto elastic.notice.signal=USR1 "
                "elastic.notice.deadline_s=120 checkpoint.every=500",
                "it needs SLURM",
                "tests/network/test_recipes.py",
            ),
        ),
        "docs/evaluate.md": (
            ran("parallel3d evaluate runs/quickstart", "perplexity", added=ONE_THREAD),
            ran("parallel3d evaluate runs/quickstart --slice unseen --by domain", "my_text.txt", added=ONE_THREAD),
            ran("parallel3d evaluate my_llama wiki.test.txt --stride 512", "wiki.test.txt", added=ONE_THREAD),
            ran("parallel3d evaluate my_llama passages.jsonl --last-word", "passages.jsonl", added=ONE_THREAD),
            ran(
                "parallel3d evaluate runs/quickstart code=test.py prose=test.txt --layout tp2.pp2",
                "prose",
                added=ONE_THREAD,
            ),
            resolved(
                "parallel3d train --config FILE checkpoint.every=500 evaluation.every_tokens=100000000 "
                '\'evaluation.sets={"unseen": "--slice unseen --by domain", "wiki": "wiki.test.txt --stride 512"}\''
            ),
            ran(
                "parallel3d evaluate RUN wiki.test.txt --follow --every-tokens 100000000 --name wiki",
                "wiki",
                added=ONE_THREAD,
            ),
            ran("parallel3d evaluate RUN --history", "wiki"),
            not_run(
                "parallel3d evaluate runs/quickstart --tasks lambada_openai,hellaswag --limit 200 --fewshot 0",
                HUB,
                "tests/evaluation/test_harness_tasks.py",
            ),
            not_run(
                "parallel3d evaluate runs/quickstart --tasks my_task --task-path my_tasks",
                "it needs lm_eval, which the tests' environment may lack",
                "tests/evaluation/test_harness_tasks.py",
            ),
        ),
        "docs/generate.md": (
            ran(
                'parallel3d generate runs/quickstart "The queen said" --max-tokens 60',
                "8 tokens in",
                added=SHORT_TEXTS,
            ),
            ran(
                'parallel3d generate runs/quickstart "The queen said" --temperature 0.8 --top-k 25 --top-p 0.95 '
                "--seed 3 --samples 4",
                "perplexity",
                added=SHORT_TEXTS,
            ),
            ran(
                'parallel3d generate my_llama --chat "What is a pipeline?" --layout tp2.pp2',
                "8 tokens in",
                added=SHORT_TEXTS,
            ),
            ran(
                "parallel3d generate my_llama --prompts questions.jsonl --batch-size 16 --out answers.jsonl",
                "16 tokens in",
                added=SHORT_TEXTS,
            ),
        ),
        "docs/extending.md": (
            not_run(
                "parallel3d train --config FILE parallel.schedule=eager_1f1b:SCHEDULE lr_schedule.kind=exponential_"
                "decay:halve_three_times optimizer.kind=ademamix:RULE 'optimizer.rule_settings={\"alpha\": 4.0}'",
                "the modules are the user's",
                "tests/extending/test_own_objects.py",
            ),
            not_run(
                "python -m parallel3d.config.schema > configs/schema.json",
                "a test compares what it prints with the file",
                "tests/config/test_shipped.py",
            ),
            not_run(
                "python launch/plan.py --config configs/quickstart.json parallel.schedule=eager-1f1b",
                CHANGED_TREE,
                "tests/extending/test_toy_schedule.py",
            ),
            not_run(
                "python launch/verify.py --config configs/quickstart.json --layouts pp2.eager-1f1b",
                CHANGED_TREE,
                "tests/extending/test_toy_schedule.py",
            ),
            not_run(
                "python launch/verify.py --config configs/quickstart.json --layouts tp2.pp2 "
                "model.architecture=starcoder2",
                CHANGED_TREE,
                "tests/extending/test_toy_family.py",
            ),
            not_run("python -m pytest tests/models -k starcoder2", CHANGED_TREE, "tests/extending/test_toy_family.py"),
            not_run(
                "python launch/verify.py --config configs/quickstart.json --layouts tp2.pp2 "
                "precision.policy=bf16_grads",
                CHANGED_TREE,
                "tests/extending/test_toy_policy.py",
            ),
        ),
        "docs/goodput.md": (
            ran("python launch/goodput.py", "8,192 devices"),
            ran("python launch/goodput.py failures.multiples=[10] days=90", "8,192 devices"),
            ran("python launch/goodput.py --scenario configs/goodput/sizes.json --chart goodput.png", "goodput.png"),
            ran(
                "python launch/goodput.py --config runs/quickstart/config.json failures.per_device_hour=1e-4",
                "you lose",
            ),
            ran("python launch/goodput.py --paper", "FlexiTrain"),
        ),
        "docs/planning.md": (
            ran("parallel3d plan --config hlat_7b --devices 8xH100-80GB:16 --tokens 1e12", "1e+12 tokens"),
            ran("parallel3d plan --config hlat_7b --devices 8xH100-80GB:16,8xA100-80GB:32", "8xA100-80GB:32"),
            ran(
                "parallel3d plan --config hlat_7b --devices 8xH100-80GB:16 --tokens 1e12 --search", "why the best wins"
            ),
            ran("parallel3d plan --config hlat_7b --devices 8xH200:8 --price 3.1", "$3.10 a device"),
            ran("parallel3d convert config my_llama my_text.txt > my_llama.json", '"initialize_from": "my_llama"'),
            ran(
                "parallel3d plan --config my_llama.json --devices 8xH100:8 --search",
                "verdict: fits",
                added="batch.global_batch_size=64",  # the text of the workshop is too short for 64 devices
            ),
            not_run(
                "parallel3d find-batch --config FILE [--limit GIB] [--most N] [section.field=value ...]",
                RUNS_OF_ITS_OWN,
                "tests/launch/test_find_batch.py",
                typed="parallel3d find-batch --config FILE --limit 1.5 --most 8 run.seed=2",
            ),
        ),
        "docs/monitors.md": (
            resolved("parallel3d train --config quickstart 'monitor.trackers=[\"wandb\"]'", "wandb"),
            not_run(
                "parallel3d track RUN_FOLDER --to mlflow",
                "it needs mlflow, which the tests' environment may lack",
                "tests/monitor/test_trackers.py",
            ),
            ran(
                "python launch/report.py runs/quickstart [--against runs/other] [--every SECONDS] [--json] "
                "[--no-charts]",
                '"steps"',
                typed="python launch/report.py runs/quickstart --against runs/other --every 1 --json --no-charts",
            ),
        ),
        "docs/report.md": (
            ran("parallel3d report runs/quickstart --html", "report.html"),
            ran("parallel3d report runs/quickstart --html --every 30", "report.html"),
            ran("parallel3d report runs/a runs/b --html --out comparison.html", "comparison.html"),
            ran("parallel3d report runs/quickstart --html --dollars-per-hour 32.8", "report.html"),
            ran("parallel3d watch runs/quickstart", "step"),
            ran("parallel3d watch runs/quickstart --serve", "http://127.0.0.1:"),
            not_run(
                "parallel3d watch runs/quickstart --serve 8600",
                "another process may have this port",
                "tests/report_page/test_served_page.py",
            ),
        ),
        "docs/results.md": (
            resolved(
                "parallel3d train --config quickstart elastic.max_rejoins=3 "
                '\'elastic.faults=[{"rank": 2, "step": 90, "phase": "backward"}, '
                '{"rank": 0, "step": 190, "phase": "all_reduce"}]\''
            ),
        ),
        "docs/sources.md": (
            resolved("python launch/train.py --config FILE data.tokenizer.path=FOLDER", FOLDER="my_llama"),
            resolved(
                "python launch/train.py --config FILE 'data.sources=[\"chats.jsonl\"]' 'data.chat={}' "
                "data.document_mask=true run.initialize_from=HF_FOLDER",
                HF_FOLDER="my_llama",
            ),
            ran(
                "python launch/prepare.py --config FILE --out FOLDER [--processes N] [section.field=value ...]",
                "FOLDER",
                typed="python launch/prepare.py --config FILE --out FOLDER --processes 1 data.validation_fraction=0.1",
            ),
            resolved("python launch/train.py --config FILE 'data.sources=[\"FOLDER\"]'"),
        ),
        "docs/studies.md": (
            not_run(
                "parallel3d study noise --config FILE --seeds 5", RUNS_OF_ITS_OWN, "tests/studies/test_study_command.py"
            ),
            not_run(
                "parallel3d study noise --config FILE --seeds 5 --change optimizer.weight_decay=0",
                RUNS_OF_ITS_OWN,
                "tests/studies/test_study_command.py",
            ),
            ran("parallel3d study noise --runs runs/a1 runs/a2 --candidate-runs runs/b1 runs/b2", "candidate"),
            not_run(
                "parallel3d study precision --config FILE --policies fp32,bf16,bf16_sr",
                RUNS_OF_ITS_OWN,
                "tests/studies/test_study_command.py",
            ),
            not_run(
                "parallel3d study batch --config FILE --batches 8,16,32,64 --seeds 2",
                RUNS_OF_ITS_OWN,
                "tests/studies/test_study_command.py",
            ),
            ran(
                "parallel3d study golden RUN_FOLDER --record --against golden.json",
                "golden.json",
                RUN_FOLDER="runs/quickstart",
            ),
            ran("parallel3d study golden RUN_FOLDER --against golden.json", "equal:", RUN_FOLDER="runs/quickstart"),
            ran("parallel3d study scaling runs/on1 runs/on2 --ranks-per-host 8", "flat"),
            not_run(
                "parallel3d study layout --config FILE --devices 2xH100-80GB --top 3",
                RUNS_OF_ITS_OWN,
                "tests/studies/test_study_command.py",
            ),
        ),
        "docs/warmup.md": (
            not_run(
                "python launch/tune_warmup.py --config FILE [--starts 8,16,32] [--max-duration STEPS] [--out "
                "FOLDER] [section.field=value ...]",
                RUNS_OF_ITS_OWN,
                "tests/launch/test_tune_warmup.py",
                typed="python launch/tune_warmup.py --config FILE --starts 8,16,32 --max-duration 100 --out FOLDER "
                "run.seed=2",
            ),
        ),
    }
)
"""By page, in the order of their blocks."""
