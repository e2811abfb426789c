"""``save_pretrained`` and ``transformers.Trainer`` on parallelized models."""

import copy

import pytest
import torch

import workbench as wb
from tests.models import zoo
from workbench.errors import CheckpointError, LayoutError
from workbench.testing import run_ranks

transformers = pytest.importorskip("transformers")
STRATEGIES = ["*: data", "*: model", "*: data | zero=3", "pipeline"]


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


def _trainer(trained, folder, **arguments):
    words = torch.randint(0, 10, (18, 8), generator=torch.Generator().manual_seed(0))
    samples = [{"input_ids": row, "labels": row} for row in words]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, learning_rate=1e-2, report_to=[], use_cpu=True,
        logging_steps=1, disable_tqdm=True, **arguments,
    )  # fmt: skip
    trainer = transformers.Trainer(model=trained, args=arguments, train_dataset=samples, eval_dataset=samples[:6])
    trainer.log = lambda logs, *_, **__: trainer.state.log_history.append(dict(logs))
    return trainer


def _losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("strategy", ["*: model", "*: data | zero=3"])
@pytest.mark.parametrize(
    "options", [{"gradient_accumulation_steps": 2}, {"gradient_checkpointing": True}, {"bf16": True}]
)
def test_the_trainer_trains_with_its_own_options_as_on_one_device(model, strategy, options, tmp_path):
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")

    def train(trained, folder):
        trainer = _trainer(trained, folder, max_steps=4, save_strategy="no", **options)
        trainer.train()
        return _losses(trainer)

    expected = train(copy.deepcopy(model), tmp_path / "one")
    assert len(expected) == 4
    found = run_ranks(lambda rank: train(wb.parallelize(copy.deepcopy(model), strategy), tmp_path / f"rank{rank}"))
    for losses in found:
        assert losses == pytest.approx(expected, abs=2e-2 if "bf16" in options else 1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_trainer_trains_saves_and_resumes_as_on_one_device(model, strategy, tmp_path, monkeypatch):
    pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
    # It allows classes to the process for a while, and simulated ranks are threads of one.
    monkeypatch.setattr(transformers.Trainer, "_load_rng_state", lambda trainer, checkpoint: None)

    def train(trained, folder, resume=None):
        trainer = _trainer(trained, folder, num_train_epochs=2, save_strategy="epoch")
        trainer.train(resume_from_checkpoint=resume)
        return [*_losses(trainer), trainer.evaluate()["eval_loss"]]

    expected = train(copy.deepcopy(model), tmp_path / "one")

    def program(rank):
        folder = tmp_path / f"rank{rank}"
        found = train(wb.parallelize(copy.deepcopy(model), strategy), folder)
        again = train(wb.parallelize(copy.deepcopy(model), strategy), folder, str(folder / "checkpoint-5"))
        return found, again

    for found, again in run_ranks(program):
        assert found == pytest.approx(expected, abs=1e-5) and again == pytest.approx(expected, abs=1e-5)
