"""Hugging Face models equal one device, in a custom loop and with `sg.Model`.

Nothing is downloaded. The first script of docs/transformers.md runs here as launchers start it.
"""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, nullcontext
from functools import cache
from itertools import islice
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import stratagem as sg
from tests.support import cpus

pytestmark = pytest.mark.timeout(110)

ROOT = Path(__file__).parents[2]
WORDS, ROWS, BATCH = 40, 21, 5  # the last batch has one row
#: how far weights may be from those of one device, by case
LIMITS = {
    "llama": 1e-6,
    "double": 1e-9,
    "checkpointing": 1e-6,
    "adamw": 1e-5,
    "lora": 1e-6,
    "accumulated": 1e-6,
    "bert": 1e-9,
    "bfloat16": 1e-2,
}
SIZES: Any = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}


def made(case: str) -> Any:
    torch.manual_seed(1)
    if case == "bert":
        config = BertConfig(
            **SIZES, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )
        return BertForSequenceClassification(config).double()
    config = LlamaConfig(
        **SIZES,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Any = LlamaForCausalLM(config)
    if case == "double":
        in_double(model)
    if case == "checkpointing":
        model.activation_checkpointing_enable()
    if case == "lora":
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    return model


def in_double(model: Any) -> None:
    """Llama computes its norms and the loss in float32 even if it is float64: not here."""

    def norm(module: Any, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)
        return module.weight * x

    def loss(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
        return F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:])

    model.double().loss_function = loss
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            module.forward = MethodType(norm, module)


def optimizer_of(case: str, parameters: Any) -> Any:
    trained = [p for p in parameters if p.requires_grad]
    if case == "adamw":
        return torch.optim.AdamW(trained, lr=3e-3)
    return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


@cache
def texts() -> Dataset:
    dice = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 13, (ROWS,), generator=dice).tolist()
    words = [torch.randint(1, WORDS, (n,), generator=dice).tolist() for n in lengths]
    return Dataset.from_dict({"input_ids": words, "kind": [i % 3 for i in range(ROWS)]})


def collate(case: str, rows: list[Any], *, shifted: bool) -> dict[str, Tensor]:
    """Pad to the longest of these rows; labels are ignored there."""
    width = max(len(row["input_ids"]) for row in rows)
    ids = [F.pad(torch.tensor(r["input_ids"]), (0, width - len(r["input_ids"]))) for r in rows]
    inputs = torch.stack(ids)
    labels = inputs.masked_fill(inputs == 0, -100)
    if case == "bert":
        labels = torch.tensor([row["kind"] for row in rows])
    elif shifted:
        labels = F.pad(labels[:, 1:], (0, 1), value=-100)
    return {"input_ids": inputs, "attention_mask": (inputs != 0).long(), "labels": labels}


def loader_of(case: str, *, pairs: bool = False) -> Any:
    def whole(rows: list[Any]) -> Any:
        return collate(case, rows, shifted=False)

    def pair(rows: list[Any]) -> Any:
        batch = collate(case, rows, shifted=True)
        return batch, batch.pop("labels")

    order = torch.Generator().manual_seed(5)
    collated = pair if pairs else whole
    return DataLoader(texts(), BATCH, shuffle=True, generator=order, collate_fn=collated)  # type: ignore[arg-type]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def gap(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


# --- a custom loop -------------------------------------------------------------------------------


def train(case: str, where: sg.Strategy | None) -> tuple[dict[str, Tensor], int]:
    """Return the weights, and how many rows were this replica's."""
    model, rows = made(case).train(), 0
    optimizer, loader = optimizer_of(case, model.parameters()), loader_of(case)
    if where is not None:
        model, optimizer, loader = where.prepare(model, optimizer, loader)
    for _ in range(2):
        for batch in loader:
            with torch.autocast("cpu", torch.bfloat16, enabled=case == "bfloat16"):
                loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rows += len(batch["labels"]) if where is None else sg.current_replica().share.examples
    return state_of(model), rows


def accumulate(where: sg.Strategy | None) -> tuple[dict[str, Tensor], int]:
    """An update from two batches, divided by the targets of both: what a `Trainer` does."""
    case, rows = "accumulated", 0
    model = made(case).train()
    optimizer, loader = optimizer_of(case, model.parameters()), loader_of(case)
    if where is not None:
        model, optimizer, loader = where.prepare(model, optimizer, loader, loss_reduction="sum")
    for _ in range(2):
        batches = iter(loader)
        while True:
            taken, tokens = [], torch.zeros(())
            for batch in islice(batches, 2):
                mine = BATCH if where is None else sg.current_replica().share.examples
                tokens += (batch["labels"][:mine, 1:] != -100).sum()
                rows += len(batch["labels"][:mine])
                taken.append(batch)
            if not taken:
                break
            n = float(tokens if where is None else where.reduce("sum", tokens))
            for batch in taken:
                model(**batch, num_items_in_batch=n).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return state_of(model), rows


def train_all(where: sg.Strategy | None) -> dict[str, tuple[dict[str, Tensor], int]]:
    done = {case: train(case, where) for case in LIMITS if case != "accumulated"}
    if where is None or not where.served:  # workers cannot add up numbers
        done["accumulated"] = accumulate(where)
    return done


@cache
def alone() -> dict[str, tuple[dict[str, Tensor], int]]:
    return train_all(None)


@pytest.fixture(scope="module", params=["2 replicas", "3 replicas", "servers"])
def strategy(request: pytest.FixtureRequest) -> Iterator[sg.Strategy]:
    strategy: sg.Strategy = (
        sg.ParameterServerStrategy(sg.LocalCluster(workers=2, ps=1), updates=sg.Synchronous())
        if request.param == "servers"
        else sg.MirroredStrategy(cpus(int(request.param[0])))
    )
    with closing(strategy):
        yield strategy


def test_your_own_loop(strategy: sg.Strategy) -> None:
    everywhere = strategy.run(train_all, strategy)
    assert LIMITS.keys() - everywhere[0] == ({"accumulated"} if strategy.served else set())
    for case in everywhere[0]:
        expected, rows = alone()[case]
        assert gap(expected, state_of(made(case))) > 0.02, case
        shares = [results[case][1] for results in everywhere]
        assert sum(shares) == rows == 2 * ROWS and min(shares) >= 2 * ROWS // len(shares) // 2
        for results in everywhere:
            assert gap(results[case][0], expected) < LIMITS[case], case


# --- sg.Model ------------------------------------------------------------------------------------


class Logits(nn.Module):
    """A tensor with the classes behind the rows, as cross entropy wants it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.by_word = model, not isinstance(model, BertForSequenceClassification)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits.transpose(1, 2) if self.by_word else logits


def fit(case: str, where: sg.Strategy | None) -> tuple[Any, dict[str, list[float]]]:
    with nullcontext() if where is None else where.scope():
        model = sg.Model(Logits(made(case)))
        precision = "bfloat16" if case == "bfloat16" else None
        model.compile(
            lambda parameters: optimizer_of(case, parameters),
            "cross_entropy",
            ["accuracy"],
            precision=precision,
        )
    history = model.fit(loader_of(case, pairs=True), epochs=2, verbose=0).history
    return model.module.model, history


@cache
def counted(case: str) -> list[float]:
    """By hand: the share of right answers in each epoch, over all targets that count."""
    model, loader = made(case).train(), loader_of(case, pairs=True)
    optimizer, told = optimizer_of(case, model.parameters()), []
    for _ in range(2):
        right = total = 0
        for inputs, labels in loader:
            output = Logits(model)(**inputs)
            F.cross_entropy(output, labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            right += int((output.argmax(1) == labels)[labels != -100].sum())
            total += int((labels != -100).sum())
        told.append(right / total)
    return told


@pytest.mark.parametrize("case", ["llama", "bert", "lora", "bfloat16"])
def test_fit(strategy: sg.Strategy, case: str, tmp_path: Path) -> None:
    model, history = fit(case, strategy)
    assert gap(state_of(model), alone()[case][0]) < LIMITS[case]
    if case != "bfloat16":
        assert history["accuracy"] == pytest.approx(counted(case), abs=1e-6)
    model.save_pretrained(tmp_path)
    kind: Any = type(model)
    again = kind.from_pretrained(tmp_path) if case != "lora" else adapted(tmp_path)
    assert gap(state_of(again), state_of(model)) == 0


def adapted(folder: Path) -> Any:
    assert not (folder / "model.safetensors").exists(), "the adapter alone"
    return PeftModel.from_pretrained(made("llama"), folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [sg.PipelineStrategy, sg.TensorParallelStrategy])
def test_stages_and_divided_layers(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Exact, though the body is not divided; the model itself does not name its inputs: refused."""
    caplog.set_level("INFO", "stratagem")
    with closing(kind(cpus(2))) as strategy:
        for case in ("llama", "bert"):
            with strategy.scope():
                model = sg.Model(Logits(made(case).float()))
                model.compile(lambda p: optimizer_of("llama", p), "cross_entropy")
            x, y = collate(case, list(texts()), shifted=True), None
            y = x.pop("labels")
            plain = copy.deepcopy(model.module)
            model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
            optimizer = optimizer_of("llama", plain.parameters())
            for start in range(0, ROWS, BATCH):
                rows = slice(start, start + BATCH)
                F.cross_entropy(plain(**{k: v[rows] for k, v in x.items()}), y[rows]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            assert gap(state_of(model.module), state_of(plain)) < 1e-6
        body = r"^(0 +0 +model.model +|model.model +- )"  # a stage has all of it; no device a part
        assert re.search(body, caplog.text, re.MULTILINE), caplog.text
        with pytest.raises(sg.NotDistributable, match="name its arguments"):
            strategy.run(train, "llama", strategy)


# --- the page ------------------------------------------------------------------------------------

#: the lines of the page's first script that are stratagem's
OURS = {
    "import stratagem as sg": "",
    "strategy = sg.MirroredStrategy()": "",
    "model, optimizer, loader = strategy.prepare(model, optimizer, loader)": "",
    "if strategy.is_chief:": "if True:",
}
COMPARED = """
for folder in sys.argv[1:]:
    again = LlamaForCausalLM.from_pretrained(folder).state_dict()
    assert len(PreTrainedTokenizerFast.from_pretrained(folder)) == len(tokenizer)
    print(max(float((again[k] - v).abs().max()) for k, v in model.state_dict().items()))
assert "stratagem" not in sys.modules
"""


def start(folder: Path, script: str, *command: str) -> subprocess.Popen[str]:
    folder.mkdir()
    (folder / "train.py").write_text(script)
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        },
    )


def output(process: subprocess.Popen[str]) -> str:
    try:
        text = process.communicate(timeout=110)[0]
    finally:
        process.kill()
    assert process.returncode == 0, text
    return text


@pytest.mark.timeout(240)
def test_the_script_of_the_page_by_a_launcher(tmp_path: Path) -> None:
    """What the chief saves is loaded, and compared, by a script that knows transformers alone."""
    page = (ROOT / "docs" / "transformers.md").read_text()
    script = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0]
    served = script.replace(
        "sg.MirroredStrategy()", "sg.ParameterServerStrategy(updates=sg.Synchronous())"
    )
    assert served != script
    launch = ("-m", "stratagem", "run")
    for launched in [
        start(tmp_path / "mirrored", script, *launch, "--replicas", "2", "train.py"),
        start(tmp_path / "served", served, *launch, "--workers", "2", "--ps", "1", "train.py"),
    ]:
        output(launched)
    plain = f"import sys\n{script}{COMPARED}"
    for line, instead in OURS.items():
        assert plain.count(line + "\n") == 1, line
        plain = plain.replace(line + "\n", instead + "\n")
    folders = [str(tmp_path / kind / "llama") for kind in ("mirrored", "served")]
    told = output(start(tmp_path / "plain", plain, "train.py", *folders))
    distances = [float(line) for line in told.splitlines() if re.fullmatch(r"[\d.e-]+", line)]
    assert len(distances) == 2 and max(distances) < 1e-5, told
