"""``save_pretrained`` and ``transformers.Trainer`` on parallelized models."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import workbench as wb
from tests.models import zoo
from workbench.errors import CheckpointError, LayoutError
from workbench.testing import run_ranks

transformers = pytest.importorskip("transformers")
STRATEGIES = ["*: data", "*: model", "*: data | zero=3", "pipeline"]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model():
    transformers.logging.disable_progress_bar()
    yield zoo.make("gpt2", "sdpa")
    transformers.logging.enable_progress_bar()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_saved_models_have_whole_tied_weights(model, strategy, tmp_path):
    run_ranks(lambda: wb.parallelize(copy.deepcopy(model), strategy).save_pretrained(tmp_path))
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    for (name, found), (_, expected) in zip(loaded.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(found, expected), name


def test_each_rank_may_have_a_directory_of_its_own(model, tmp_path):
    def program(rank):
        parallel = wb.parallelize(copy.deepcopy(model), "*: model")
        parallel.save_pretrained(tmp_path / str(rank), state_dict=parallel.state_dict())

    run_ranks(program)
    for rank in range(2):
        loaded = type(model).from_pretrained(tmp_path / str(rank))
        assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_a_failure_to_write_is_one_on_all_ranks(model, tmp_path):
    (tmp_path / "file").touch()

    def program(rank):
        parallel = wb.parallelize(copy.deepcopy(model), "*: model")
        with pytest.raises(CheckpointError if rank else OSError):
            parallel.save_pretrained(tmp_path / "file" / "folder")

    run_ranks(program)


def test_safetensors_of_shards_are_refused(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")

    def program():
        x = wb.ones(4, 2, placement=wb.placement.all("cpu"), sbp="S(0)")
        with pytest.raises(LayoutError, match=r"'x' is a global tensor of shape \(4, 2\).*export_safetensors"):
            safetensors.save_file({"x": x}, tmp_path / "x.safetensors")
        with pytest.raises(LayoutError, match="full_tensor"):
            safetensors.save({"x": x})

    run_ranks(program)


def trainer_of(trained, folder, **arguments):
    words = torch.randint(0, 10, (18, 8), generator=torch.Generator().manual_seed(0))
    samples = [{"input_ids": row, "labels": row} for row in words]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, learning_rate=1e-2, report_to=[], use_cpu=True,
        logging_steps=1, disable_tqdm=True, **arguments,
    )  # fmt: skip
    trainer = transformers.Trainer(model=trained, args=arguments, train_dataset=samples, eval_dataset=samples[:6])
    trainer.log = lambda logs, *_, **__: trainer.state.log_history.append(dict(logs))
    return trainer


def losses_of(trainer, resume=None):
    trainer.train(resume_from_checkpoint=resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [*losses, trainer.evaluate()["eval_loss"]]


PROGRAM = """
import json, os, sys, transformers, workbench as wb
from tests.models import zoo
from tests.models.test_trainer import losses_of, trainer_of
strategy, options, folder = sys.argv[1], json.loads(sys.argv[2]), f"{sys.argv[3]}/{os.getpid()}"
model = zoo.make("gpt2", "sdpa")
if strategy:
    wb.init(device="cpu")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    model = wb.parallelize(model, strategy)
start = {name: value.clone() for name, value in model.state_dict().items()}
losses = losses_of(trainer_of(model, folder, **options))
if "save_strategy" in options:
    model.load_state_dict(start)
    losses += losses_of(trainer_of(model, folder, **options), f"{folder}/checkpoint-5")
with open(f"{folder}.json", "w") as file:
    json.dump(losses, file)
"""
TWO_EPOCHS = {"num_train_epochs": 2, "save_strategy": "epoch"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        *((strategy, TWO_EPOCHS) for strategy in STRATEGIES),
        ("*: data | zero=3", {"max_steps": 4, "gradient_accumulation_steps": 2}),
        ("*: data | zero=3", {"max_steps": 4, "gradient_checkpointing": True}),
        ("*: data | zero=3", {"max_steps": 4, "bf16": True}),
    ],
)
def test_the_trainer_trains_evaluates_and_resumes_as_on_one_device(strategy, options, tmp_path):
    """On processes: accelerate keeps its state in the process, and simulated ranks share one."""
    (tmp_path / "program.py").write_text(PROGRAM)

    def train(folder, *launcher, strategy):
        folder.mkdir()
        command = [sys.executable, *launcher, tmp_path / "program.py", strategy, json.dumps(options), folder]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}  # the program takes a model from these tests
        ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert ended.returncode == 0, ended.stderr
        return [json.loads(file.read_text()) for file in folder.glob("*.json")]

    (expected,) = train(tmp_path / "one", strategy="")
    launcher = "-m", "torch.distributed.run", "--nproc-per-node", "2"
    first, second = train(tmp_path / "both", *launcher, strategy=strategy)
    assert len(expected) > 4 and first == second
    assert first == pytest.approx(expected, abs=1e-2 if "bf16" in options else 1e-5)
