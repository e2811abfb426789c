"""The text of exported scripts: what it says of a strategy, and what it refuses."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.session.scripts.jobs import (
    BATCH_SIZE,
    NUM_STEPS,
    Pairs,
    count,
    fixed_heads,
    fused,
    mean_over_words,
    mlp,
    texts,
    transformer,
    vectors,
    words_of,
)
from workbench.cli import main
from workbench.errors import RunError, StrategyError
from workbench.testing import run_ranks
from workbench.training.runs.job import Job
from workbench.training.strategies.paired_splits import takes_columns

SPLIT = "*: data; blocks: model; words: model:row; head: model:column | 1x1x2"


def script_of_torch(strategy: str, make: Any, num_ranks: int = 2, **changes: Any) -> str:
    return wb.planner.script(strategy, num_ranks, **(words_of(make) | changes), library="torch")


def styles_of(text: str) -> dict[str, str]:
    return dict(re.findall(r'"([\w.]+)": ((?:Col|Row)wiseParallel\(.*\)),', text))


@pytest.mark.parametrize("library", ["workbench", "torch"])
@pytest.mark.parametrize("strategy", ["*: data", SPLIT, "*: data | zero=2 recompute bf16", "*: data | zero=3 shards=2"])
def test_scripts_are_python_and_formatted(strategy: str, library: Any, tmp_path: Path) -> None:
    num_ranks = 4 if "shards" in strategy else 2
    text = wb.planner.script(strategy, num_ranks, **words_of(transformer), library=library)
    compile(text, "script.py", "exec")
    (tmp_path / "script.py").write_text(text)
    first_party = "lint.isort.known-first-party = ['tests']"  # as a file beside the script is
    for command in (["format", "--diff"], ["check", "--config", first_party]):
        run = [sys.executable, "-m", "ruff", *command, "--isolated", "--no-cache", "script.py"]
        done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_each_row_and_option_has_a_comment() -> None:
    text = wb.planner.script("*: data; head: model:row@1 | mb=4 gpipe", 2)
    assert "    # pipeline stage 1; the model ranks share out the input features" in text
    assert '    # a step cuts its batch into 4 micro-batches\n    "mb=4",' in text
    assert "# all forwards" not in text and "all forwards of a step" in text


def test_the_strategy_in_the_script_is_the_one_given() -> None:
    rows = "*: data; blocks: model; head: model:column"
    strategy = f"{rows} | 1x2x2 mb=2 zero=1 recompute=cheap offload=optimizer sequence bf16"
    names: dict[str, Any] = {"__file__": "script.py"}
    text = wb.planner.script(strategy, 4, **words_of(transformer))
    exec(text.partition("def main")[0].replace("import workbench as wb", ""), names)
    assert names["STRATEGY"] == strategy


def test_a_row_that_decides_nothing_says_so() -> None:
    assert '# no layer: later rows decide\n    "*: data"' in wb.planner.script(
        "*: data; 0: model; 2: model", 2, **words_of(mlp)
    )


def test_functions_of_a_notebook_have_a_place_to_fill_in() -> None:
    def make() -> nn.Module:
        return mlp()

    text = wb.planner.script("data", 2, make, None, F.cross_entropy)
    assert 'raise NotImplementedError("FILL IN: model_fn")' in text and "FILL IN: dataset" in text
    assert "from torch.nn.functional import cross_entropy as loss_fn" in text
    assert ".<locals>.make\n    raise NotImpl" in text and text.count("# you passed: ") == 1
    make.__module__, make.__qualname__ = "__main__", "make"
    text = wb.planner.script("data", 2, make, Pairs(), nn.CrossEntropyLoss(), batch_size=8)
    assert re.findall("# you passed: (.*)", text) == [
        "make",
        "tests.session.scripts.jobs.Pairs(...)",
        "torch.nn.modules.loss.CrossEntropyLoss(...)",
    ]
    compile(text, "script.py", "exec")


def test_columns_go_to_their_row_as_they_are_where_that_is_right() -> None:
    paired = styles_of(script_of_torch(SPLIT, transformer))
    names = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "up")
    assert {paired[f"blocks.1.{name}"] for name in names} == {"ColwiseParallel()"}
    assert {paired[f"blocks.0.{name}"] for name in ("attention.o_proj", "down")} == {"RowwiseParallel()"}
    assert paired["words"] == "RowwiseParallel(input_layouts=Replicate())"
    assert paired["head"] == "ColwiseParallel(output_layouts=Replicate())"


@pytest.mark.parametrize("make", [fused, fixed_heads])
def test_columns_that_may_not_be_cut_are_gathered(make: Any) -> None:
    """Queries, keys and values in one layer, and a number of heads that is fixed."""
    styles = styles_of(script_of_torch(SPLIT, make))
    assert styles["blocks.0.attention.o_proj"] == "RowwiseParallel(input_layouts=Replicate())"
    assert styles["blocks.0.down"] == "RowwiseParallel()"


def test_without_samples_columns_are_gathered() -> None:
    styles = styles_of(script_of_torch(SPLIT, transformer, dataset=None))
    assert set(styles.values()) == {
        "ColwiseParallel(output_layouts=Replicate())",
        "RowwiseParallel(input_layouts=Replicate())",
    }


def test_trying_out_a_pair_leaves_the_model_and_the_random_numbers_alone() -> None:
    up, down, x = nn.Linear(4, 8), nn.Linear(8, 2), torch.randn(3, 4)
    before, state = down(up(x)), torch.get_rng_state()
    assert takes_columns(lambda: down(up(x).relu()), [up], down, 2)
    assert not takes_columns(lambda: down(F.dropout(up(x))), [up], down, 2)
    assert not takes_columns(lambda: up(x), [up], down, 2)  # is not called
    assert torch.equal(down(up(x)), before) and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "words"),
    [
        ("*: data", 2, "DistributedDataParallel(model)"),
        ("*: data | zero=2", 2, "again = False"),
        ("*: data | zero=3", 2, "again = True"),
        ("*: data | zero=3 shards=2", 4, 'names = ("replicate", "shard")'),
        ("*: data; blocks: model | 1x2x2", 4, 'names = ("replicate", "shard", "model")'),
        ("*: data; blocks: model | 1x2x2 zero=3", 4, 'names = ("shard", "model")'),
        ("*: data | recompute", 2, "checkpoint_wrapper(model.get_submodule(name))"),
        ("*: data | bf16", 2, "with torch.autocast(device.type, torch.bfloat16):"),
    ],
)
def test_what_torch_has_for_it(strategy: str, num_ranks: int, words: str) -> None:
    text = script_of_torch(strategy, transformer, num_ranks)
    assert words in text and "workbench as wb" not in text
    # Where Python ended by itself, 3 of 18 runs aborted: a thread of gloo freed a tensor then.
    assert text.rstrip().splitlines()[-1].startswith("    os._exit(0)  # a thread of gloo")


def test_one_error_names_all_that_torch_has_no_equivalent_for() -> None:
    options = "2x1x1 mb=4 1f1b zero=1 sequence recompute=cheap offload=optimizer fp16"
    with pytest.raises(StrategyError) as error:
        script_of_torch(f"*: data; head: model@1 | {options}", transformer)
    refused = ["head: model@1", "mb=4", "zero=1", "recompute=cheap", "offload=optimizer", "sequence", "fp16"]
    lines = str(error.value).splitlines()[1:-1]
    assert len(lines) == len(refused)
    assert all(line.startswith(f"  {each}: ") for line, each in zip(lines, refused, strict=True))
    assert "stage 1 of a pipeline" in str(error.value)


@pytest.mark.parametrize(
    ("strategy", "batch_size", "words"),
    [
        ("*: data; head: model | 1x1x3", 9, "head: model: head has 16 features, which do not divide by 3 model ranks"),
        ("*: model | 1x1x3 zero=3", 9, "zero=3: there is 1 data rank"),
        ("*: data | 1x3x1", 8, "a batch of 8 does not divide by"),
    ],
)
def test_numbers_that_do_not_divide_are_refused(strategy: str, batch_size: int, words: str) -> None:
    with pytest.raises(StrategyError, match=re.escape(words)):
        script_of_torch(strategy, transformer, 3, batch_size=batch_size)


def test_layers_of_other_kinds_and_shared_weights_are_refused() -> None:
    def images() -> nn.Module:
        return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 2))

    def tied() -> nn.Module:
        model = transformer()
        model.words.weight = nn.Parameter(torch.zeros(16, 32))
        model.head.weight = model.words.weight
        return model

    with pytest.raises(StrategyError, match=r"0: model: 0 is a Conv2d; .*take Linear and Embedding"):
        wb.planner.script("*: data; 0: model | 1x1x2", 2, images, library="torch")
    with pytest.raises(StrategyError, match="shares its weight"):
        wb.planner.script("*: model | 1x1x2", 2, tied, library="torch")


def test_a_model_with_its_own_loss_takes_the_batch() -> None:
    data = {"ids": texts[0], "labels": texts[1]}
    text = wb.planner.script("*: data", 2, transformer, data, batch_size=8, library="torch")
    assert "output = model(**batch)\n" in text and "loss = loss_of(output)" in text
    assert "wb.forward_backward(model, inputs=batch)" in wb.planner.script(
        "*: data", 2, transformer, data, batch_size=8
    )


def test_a_class_is_called_for_its_data_set() -> None:
    home = "tests.session.scripts.jobs"
    texts = [
        wb.planner.script("*: data", 2, mlp, f"{home}:{name}", F.cross_entropy, batch_size=8, library=library)
        for name in ("Pairs", "table")
        for library in ("workbench", "torch")
        if (name, library) != ("table", "torch")
    ]
    assert all(text.count("dataset()") == 1 for text in texts)


def test_what_torch_has_no_loop_for() -> None:
    with pytest.raises(StrategyError, match="count: ranks average their losses, however many terms"):
        wb.planner.script("*: data", 2, mlp, vectors, F.cross_entropy, count=count, batch_size=8, library="torch")
    alone = wb.planner.script("*: data", 1, mlp, vectors, F.cross_entropy, count=count, batch_size=8, library="torch")
    assert "def count" not in alone and "count(" not in alone.replace("device_count(", "")
    nested = (vectors[0], {"classes": vectors[1]})
    with pytest.raises(RunError, match=r"has a dict beside its arrays.*list of samples"):
        wb.planner.script("*: data", 2, mlp, nested, F.cross_entropy, batch_size=8, library="torch")


def test_mistakes_in_the_arguments() -> None:
    with pytest.raises(RunError, match="not of the form 'module:name'"):
        wb.planner.script("*: data", 2, "mine.model_fn")
    with pytest.raises(RunError, match="no module 'no_such_file' here"):
        wb.planner.script("*: data", 2, "no_such_file:model_fn")
    with pytest.raises(RunError, match=r"tests\.session\.scripts\.jobs has no 'no_model'"):
        wb.planner.script("*: data", 2, "tests.session.scripts.jobs:no_model")
    with pytest.raises(StrategyError, match="'pipeline' is made for a model"):
        wb.planner.script("pipeline", 2)
    with pytest.raises(StrategyError, match="needs the model's layers"):
        wb.planner.script("*: data", 2, library="torch")
    with pytest.raises(RunError, match="there are workbench and torch"):
        wb.planner.script("*: data", 2, library="jax")  # type: ignore[arg-type]
    with pytest.raises(RunError, match="batch_size=25, but the data set has 24"):
        wb.planner.script("*: data", 2, **(words_of(mlp) | {"batch_size": 25}))
    with pytest.raises(StrategyError, match="does not fit"):
        wb.planner.script("*: data | 3x1x1", 2, **words_of(mlp))


def test_an_error_in_an_imported_file_is_its_own(tmp_path: Path, monkeypatch: Any) -> None:
    """An AttributeError was taken for a missing name, and an import of it for a missing file."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "exported_mistake.py").write_text("import torch\ntorch.no_such_name\ndef model_fn(): ...\n")
    (tmp_path / "exported_import.py").write_text("import no_such_library\ndef model_fn(): ...\n")
    with pytest.raises(AttributeError, match="no_such_name"):
        wb.planner.script("*: data", 2, "exported_mistake:model_fn")
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        wb.planner.script("*: data", 2, "exported_import:model_fn")
    with pytest.raises(RunError, match="no module 'exported_mistakes' here"):
        wb.planner.script("*: data", 2, "exported_mistakes.part:model_fn")


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "exported_job.py").write_text(
        "from tests.session.scripts.jobs import mlp as model_fn, vectors as dataset, mean_over_words as loss_fn\n"
    )
    job, out = str(tmp_path / "exported_job.py"), tmp_path / "train.py"
    assert main(["script", job, "*: data | zero=3", "--batch", str(BATCH_SIZE), "--torch", "--out", str(out)]) == 0
    assert f"torchrun --nproc-per-node 2 {out}" in capsys.readouterr().out
    assert "from exported_job import dataset, loss_fn, model_fn" in out.read_text()
    assert main(["script", job, "model", "--batch", str(BATCH_SIZE)]) == 0
    assert "wb.parallelize" in capsys.readouterr().out
    assert main(["script", str(tmp_path / "none.py"), "data"]) == 2


def test_a_script_has_its_own_checkpoints_and_says_where_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """The second script of a folder took the first one's last step, and trained nothing without a word."""
    monkeypatch.setattr(wb, "init", lambda: None)
    text = wb.planner.script("*: data", 2, **words_of(mlp))

    def printed(name: str, text: str) -> list[str]:
        names: dict[str, Any] = {"__name__": "script", "__file__": str(tmp_path / name)}
        exec(text, names)
        run_ranks(names["main"], 2)
        return capsys.readouterr().out.splitlines()

    assert len(printed("a.py", text)) == len(printed("b.py", text)) == NUM_STEPS
    head, rest = printed("b.py", text)
    assert head == f"continues at step {NUM_STEPS} of {NUM_STEPS} from {tmp_path / 'b.checkpoints'}"
    assert rest.startswith("nothing left to do: ")
    longer = text.replace(f"STEPS = {NUM_STEPS}", f"STEPS = {NUM_STEPS + 1}")
    assert [line.split()[:4] for line in printed("b.py", longer)] == [
        ["continues", "at", "step", str(NUM_STEPS)],
        ["step", str(NUM_STEPS + 1), "loss", ANY],
    ]


def test_the_printed_command_starts_the_script_from_any_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    job, words = Path("my jobs/exported_elsewhere.py"), "torchrun --nproc-per-node 2"
    job.parent.mkdir()
    job.write_text(
        "from tests.session.scripts.jobs import mlp as model_fn, vectors as dataset, mean_over_words as loss_fn\n"
    )
    for out, command in {
        "new/train.py": f"PYTHONPATH='my jobs':$PYTHONPATH {words} new/train.py",
        "my jobs/train.py": f"{words} 'my jobs/train.py'",
    }.items():
        assert main(["script", str(job), "*: data", "--batch", str(BATCH_SIZE), "--out", out]) == 0
        assert capsys.readouterr().out == f"script written to {out}: {command}\n"
        found = "It imports exported_elsewhere, found in the script's folder or on PYTHONPATH."
        assert found in Path(out).read_text()


def test_no_weights_are_made_where_no_layer_is_split() -> None:
    devices = []

    def make() -> nn.Module:
        model = mlp()
        devices.append(model[0].weight.device.type)
        return model

    for library in ("workbench", "torch"):
        wb.planner.script("*: data | zero=3", 2, make, library=library)  # type: ignore[arg-type]
    assert devices == ["meta", "meta"]


def test_batches_are_those_of_a_comparison() -> None:
    job = Job(mlp, vectors, mean_over_words, None, BATCH_SIZE, NUM_STEPS)
    generator = torch.Generator().manual_seed(0)
    epochs = [torch.randperm(24, generator=generator).split(BATCH_SIZE) for _ in range(2)]
    for batch, rows in zip(job.batches(), [rows for epoch in epochs for rows in epoch], strict=True):
        assert torch.equal(batch.inputs, vectors[0][rows])


def test_batch_norm_takes_the_whole_batch_on_gpus() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))

    for strategy, is_there in (("*: data", True), ("*: model | 1x1x2", False)):
        text = wb.planner.script(strategy, 2, make, library="torch")
        assert ("convert_sync_batchnorm(model)" in text) == is_there


@pytest.mark.parametrize("name", ["plain", 'say "hi"', "it's", "a\\b", "both ' and \"", "line\nbreak", "lambda"])
def test_names_of_layers_are_written_as_python_reads_them(name: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.ModuleDict({name: nn.Linear(4, 4), "other": nn.Linear(4, 4)}))

    for strategy in ("*: data | zero=3", "*: model:column | 1x1x2"):
        names: dict[str, Any] = {}
        text = wb.planner.script(strategy, 2, make, library="torch")
        found = re.search(r"    (?:units|styles) = [\[{]\n.*?\n    [\]}]", text, re.DOTALL)
        styles = {"ColwiseParallel": lambda **options: None, "Replicate": lambda: None}
        exec(inspect.cleandoc(found.group()) if found else "", styles, names)
        assert f"0.{name}" in names.get("units", names.get("styles"))


def test_a_name_that_python_does_not_read_is_refused(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    job = tmp_path / "lambda.py"
    job.write_text("from tests.session.scripts.jobs import mlp as model_fn, vectors as dataset\n")
    assert main(["script", str(job), "*: data"]) == 2
    assert "name of a module, e.g. mine.py" in capsys.readouterr().err
    with pytest.raises(RunError, match="a script cannot import 'lambda'"):
        wb.planner.script("*: data", 2, "lambda:model_fn")
    with pytest.raises(RunError, match="a script cannot import 'my-model'"):
        wb.planner.script("*: data", 2, "models.my-model:make")
    monkeypatch.setitem(sys.modules, "my-model", SimpleNamespace(make=mlp))
    monkeypatch.setattr(mlp, "__module__", "my-model")
    monkeypatch.setattr(mlp, "__qualname__", "make")
    assert "FILL IN: model_fn" in wb.planner.script("*: data", 2, mlp)
    monkeypatch.setattr(
        "workbench.session.scripts.workbench_script.workbench_script", lambda recipe: "a = 1\nb = = 2\n"
    )
    with pytest.raises(RunError, match="line 2 would be no Python: b = = 2: invalid syntax"):
        wb.planner.script("*: data", 2)
