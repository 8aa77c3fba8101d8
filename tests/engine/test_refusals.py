"""What protrain.wrap refuses: before any memory is taken, with an error that names the thing and the remedy."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protrain
from protrain.engine.arena import Arena
from protrain.errors import PlanError
from protrain.planning import Plan
from protrain.quantities import parse_bytes
from tests.engine.harness import CKPT, Spec, adamw, wrap_under

Batch = dict[str, Tensor]
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def batch(tiny_batch: Callable[..., Batch]) -> Batch:
    return tiny_batch()


@pytest.fixture
def model(tiny_model: Callable[..., nn.Module]) -> nn.Module:
    return tiny_model("llama")


@pytest.fixture
def no_memory_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(*_: Any, **__: Any) -> None:
        raise AssertionError("memory was taken before the plan was known to fit")

    monkeypatch.setattr(Arena, "reserve", take)
    monkeypatch.setattr(sys.modules["protrain.wrap"], "build_engine", take)  # protrain.wrap itself is the function


def refused(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, words: str, kind: type[Exception], **options: Any
) -> Exception:
    """Wrapping raises ``kind`` with ``words``, and leaves model and optimizer as they were."""
    parameters = [(p, p.data_ptr(), p.detach().clone(), type(p)) for p in model.parameters()]
    attributes = [{name: id(value) for name, value in vars(module).items()} for module in model.modules()]
    arguments: Any = {"device": "cpu", "progress": False} | options
    with pytest.raises(kind, match=words) as caught:
        protrain.wrap(model, optimizer, example_batch=batch, **arguments)
    assert type(caught.value) is kind, "a subclass says something else"
    for parameter, address, value, cls in parameters:
        assert parameter.data_ptr() == address
        assert type(parameter) is cls
        assert parameter.equal(value)
        assert parameter.grad is None
    assert [{name: id(value) for name, value in vars(module).items()} for module in model.modules()] == attributes
    assert "\n" not in str(caught.value)
    return caught.value


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "words"),
    [("plan", "cannot read a plan from .*nowhere: No such file"), ("weights", "there is no folder .*nowhere")],
)
def test_a_missing_file_is_found_before_the_model_runs(
    option: str, words: str, model: nn.Module, batch: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def profile(*_: Any, **__: Any) -> None:
        raise AssertionError("the model ran, which takes minutes where it is large")

    monkeypatch.setattr(sys.modules["protrain.wrap"], "cached_profile", profile)
    options = {option: tmp_path / "nowhere"}
    refused(model, adamw(model), batch, words, ValueError, **options)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_memory_taken")
def test_a_device_that_is_too_small(model: nn.Module, batch: Batch) -> None:
    words = "no plan fits the device memory: needed .*, available 64 KiB; largest part: activations .*Host memory: need"
    error = refused(model, adamw(model), batch, words, PlanError, device_memory="64KiB", host_memory="1GiB")
    assert isinstance(error, PlanError)
    assert error.available_bytes == 64 * 1024
    assert error.needed_bytes > error.available_bytes


@pytest.mark.usefixtures("no_memory_taken")
def test_a_host_that_is_too_small(model: nn.Module, batch: Batch) -> None:
    words = r"no plan fits the host memory: needed .*, available 100 KiB; largest part: optimizer states.*Device memory"
    error = refused(model, adamw(model), batch, words, PlanError, device_memory="300KiB", host_memory="100KiB")
    assert isinstance(error, PlanError)
    assert error.needed_bytes > error.available_bytes == 100 * 1024


@pytest.mark.parametrize("which", ["device_memory", "host_memory"])
def test_the_remedy_of_a_plan_error_works(
    tiny_model: Callable[..., nn.Module], tiny_batch: Callable[..., Batch], which: str
) -> None:
    model, batch = tiny_model("gpt2"), tiny_batch(batch=4)
    memory: dict[str, Any] = {"device_memory": "600KiB", "host_memory": "2GiB"} | {which: "40KiB"}
    error = refused(model, adamw(model), batch, f"{which} of at least", PlanError, **memory)
    found = re.search(rf"{which} of at least ([\d.]+\w+)", str(error))
    assert found is not None
    memory[which] = found.group(1)
    protrain.wrap(model, adamw(model), example_batch=batch, device="cpu", progress=False, **memory)
    assert parse_bytes(found.group(1)) < 1.01 * getattr(error, "needed_bytes", 0)


def test_the_smaller_batch_of_a_plan_error_fits() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))
    batch = (torch.randn(512, 32),)
    words = r"a batch of \d+ instead of 512 fits"
    error = refused(model, adamw(model), batch, words, PlanError, device_memory="150KiB", host_memory="1GiB")
    found = re.search(r"a batch of (\d+) instead", str(error))
    assert found is not None
    smaller = int(found.group(1))
    assert smaller > 64, "it is the smallest change that is asked for"
    smaller_batch = (batch[0][:smaller].clone(),)
    options: Any = {"device": "cpu", "device_memory": "150KiB", "host_memory": "1GiB", "progress": False}
    protrain.wrap(model, adamw(model), example_batch=smaller_batch, **options)


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device_memory": "24 apples"}, "device_memory must be .* text like '24GiB', not '24 apples'"),
        ({"host_memory": "24 apples"}, "host_memory must be .* text like '24GiB', not '24 apples'"),
        ({"device_memory": 0}, "device_memory must be more than 0 bytes, .*not 0"),
        ({"host_memory": -1}, "host_memory must be more than 0 bytes, .*not -1"),
        ({"dtype": "float64"}, "dtype must be bfloat16, float16 or float32, not 'float64'"),
        ({"dtype": torch.int8}, "dtype must be bfloat16, float16 or float32, not torch.int8"),
        ({"device": "tpu"}, "device must be a CUDA GPU or the CPU, not 'tpu'"),
        ({"device": "meta"}, "device must be a CUDA GPU or the CPU, not meta"),
        ({"dtype": "float16", "step_during_backward": True}, "step_during_backward=True .*float16.*use bfloat16"),
        ({"accumulation": 0}, "accumulation must be 1 or more, the backward\\(\\) calls of a step, not 0"),
        ({"accumulation": "2"}, "accumulation must be 1 or more, .* not '2'"),
        ({"plan": {"n_persist": 1}}, "plan must be a Plan, or the path of a JSON file of one, not a dict"),
    ],
)
def test_wrong_arguments(model: nn.Module, batch: Batch, options: Any, words: str) -> None:
    refused(model, adamw(model), batch, words, ValueError, **options)


def test_what_is_no_module(model: nn.Module, batch: Batch) -> None:
    name: Any = "model"
    with pytest.raises(ValueError, match=r"model must be a torch\.nn\.Module, not str"):
        protrain.wrap(name, adamw(model), example_batch=batch, device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", 0])
def test_no_gpu(model: nn.Module, batch: Batch, device: Any) -> None:
    words = "there is no CUDA GPU here: pass device='cpu'|must be a CUDA GPU or the CPU, not 0"
    refused(model, adamw(model), batch, words, ValueError, device=device)


@pytest.mark.parametrize("kind", [torch.zeros, list, set])
def test_a_batch_is_a_mapping_or_a_tuple(model: nn.Module, batch: Batch, kind: Any) -> None:
    wrong = kind(3) if kind is torch.zeros else kind(batch)
    refused(model, adamw(model), wrong, r"a batch must be a mapping .* or a tuple .*, not", ValueError)


def test_a_model_that_checkpoints_already(model: Any, batch: Batch) -> None:
    model.gradient_checkpointing_enable()
    words = r"already checkpoints its activations.*model.gradient_checkpointing_disable\(\)"
    refused(model, adamw(model), batch, words, ValueError)
    model.gradient_checkpointing_disable()
    protrain.wrap(model, adamw(model), example_batch=batch, device="cpu", progress=False)


# -- the optimizer -----------------------------------------------------------------------------------------------------


class Customised(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), "must be torch.optim.AdamW or torch.optim.Adam, not SGD"),
        (lambda p: torch.optim.NAdam(p), "must be torch.optim.AdamW or torch.optim.Adam, not NAdam"),
        (lambda p: Customised(p), "must be torch.optim.AdamW or torch.optim.Adam, not Customised"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), r"amsgrad=True of Adam.* is not supported: pass amsgrad=False"),
        (lambda p: torch.optim.Adam(p, maximize=True), r"maximize=True of Adam.* is not supported: pass max"),
    ],
)
def test_optimizers_that_are_not_adam(
    model: nn.Module, batch: Batch, make: Callable[[Any], torch.optim.Optimizer], words: str
) -> None:
    refused(model, make(model.parameters()), batch, words, ValueError)


def test_an_option_of_one_group_counts(model: nn.Module, batch: Batch) -> None:
    first, *rest = model.parameters()
    groups: list[dict[str, Any]] = [{"params": rest}, {"params": [first], "amsgrad": True}]
    optimizer = torch.optim.AdamW(groups)
    refused(model, optimizer, batch, "amsgrad=True of Adam and AdamW is not supported", ValueError)


def test_the_optimizer_of_another_model(model: nn.Module, tiny_model: Callable[..., nn.Module], batch: Batch) -> None:
    words = (
        r"parameter of shape \(96, 32\) that is not the model's: make the optimizer from this model's parameters\(\)"
    )
    refused(model, adamw(tiny_model("llama", seed=1)), batch, words, ValueError)


def test_nothing_to_train(model: nn.Module, batch: Batch) -> None:
    optimizer = adamw(model)
    model.requires_grad_(False)
    refused(model, optimizer, batch, "no parameter in the optimizer requires a gradient", ValueError)


def test_parameters_that_would_not_be_trained(batch: Batch) -> None:
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.phase.real

    model = Waves()
    optimizer = torch.optim.AdamW(model.parameters())
    refused(model, optimizer, (torch.ones(2, 4),), r"phase is torch\.complex64.*torch\.view_as_real", ValueError)


def test_scripted_modules(batch: Batch) -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    refused(
        model, torch.optim.AdamW(model.parameters()), (torch.ones(2, 4),), "module '?1'? is a ScriptModule", ValueError
    )


def test_sparse_tensors() -> None:
    ids = (torch.zeros(2, 2).long(),)
    model: Any = nn.Sequential(nn.EmbeddingBag(8, 4, sparse=True), nn.Linear(4, 4))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    refused(model, optimizer, ids, "'0' makes sparse gradients.*sparse=False", ValueError)
    model[0].requires_grad_(False)  # makes none
    model, optimizer = protrain.wrap(model, adamw(model), example_batch=ids, device="cpu", progress=False)
    optimizer.backward(model(*ids).sum())
    optimizer.step()
    model = nn.Linear(4, 4)
    model.register_buffer("graph", torch.eye(4).to_sparse())
    optimizer = torch.optim.AdamW(model.parameters())
    refused(model, optimizer, (torch.ones(2, 4),), "buffer graph is torch.sparse_coo.*a dense one", ValueError)


def test_modules_that_exchange_gradients() -> None:
    model = nn.DataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    refused(model, optimizer, (torch.ones(2, 4),), "is a DataParallel.*wrap the module inside", ValueError)


def test_gradients_from_before(model: nn.Module, batch: Batch) -> None:
    optimizer = adamw(model)
    model(**batch).loss.backward()
    with pytest.raises(ValueError, match=r"has a gradient already.*call optimizer\.zero_grad\(\) before"):
        protrain.wrap(model, optimizer, example_batch=batch, device="cpu", progress=False)
    optimizer.zero_grad()
    protrain.wrap(model, optimizer, example_batch=batch, device="cpu", progress=False)


def test_wrapping_twice(model: nn.Module, batch: Batch) -> None:
    options: Any = {"example_batch": batch, "device": "cpu", "progress": False}
    wrapped, optimizer = protrain.wrap(model, adamw(model), **options)
    for again in (optimizer, torch.optim.AdamW(wrapped.parameters())):
        with pytest.raises(ValueError, match="the model is wrapped already: use the model and optimizer that"):
            protrain.wrap(wrapped, again, **options)
    wrapped(**batch).loss.backward()
    optimizer.step()


def test_parameters_in_no_group_are_announced(model: nn.Module, batch: Batch) -> None:
    head = model.get_parameter("lm_head.weight")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p is not head], lr=1e-2)
    options: Any = {"example_batch": batch, "device": "cpu", "progress": False}
    with pytest.warns(UserWarning, match="1 parameters require a gradient but are in no optimizer group.*lm_head"):
        wrapped, trainer = protrain.wrap(model, optimizer, **options)
    before = wrapped.state_dict()
    wrapped(**batch).loss.backward()
    trainer.step()
    changed = {name for name, value in wrapped.state_dict().items() if not value.equal(before[name])}
    assert changed == before.keys() - {"lm_head.weight"}


# -- plans that were given ---------------------------------------------------------------------------------------------


@pytest.fixture
def plan(tiny_model: Callable[..., nn.Module], batch: Batch) -> Plan:
    model = tiny_model("llama")
    spec = Spec("some", "all", (CKPT,))
    return wrap_under(spec, model, adamw(model), batch, device=torch.device("cpu"))[1].plan


def test_a_plan_file_works(model: nn.Module, batch: Batch, plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    _, optimizer = protrain.wrap(
        model, adamw(model), example_batch=batch, device="cpu", plan=tmp_path / "plan.json", progress=False
    )
    for name in ("n_persist", "n_buffer", "n_swap", "n_ckpt", "block_modes", "device_bytes", "host_bytes"):
        assert getattr(optimizer.plan, name) == getattr(plan, name)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot read a plan from .*plan.json: No such file"),
        ("{ not json", "plan.json is not a plan, as it is not JSON"),
        ("[]", "plan.json is not a plan: it holds a JSON list"),
        ("{}", "plan.json is not a plan: it is empty"),
    ],
)
def test_a_plan_file_that_is_none(model: nn.Module, batch: Batch, text: str | None, words: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "plan.json").write_text(text)
    refused(model, adamw(model), batch, words, ValueError, plan=str(tmp_path / "plan.json"))


def test_a_plan_of_other_parameters_is_refused_before_the_model_runs(
    plan: Plan, tiny_model: Callable[..., nn.Module], batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def profile(*_: Any, **__: Any) -> None:
        raise AssertionError("the model ran, which takes minutes where it is large")

    monkeypatch.setattr(sys.modules["protrain.wrap"], "cached_profile", profile)
    model: Any = tiny_model("llama")
    one_group = torch.optim.AdamW(model.parameters())
    shallow: Any = tiny_model("llama")
    del shallow.model.layers[1:]
    frozen = tiny_model("llama")
    next(frozen.parameters()).requires_grad_(False)
    for other, optimizer, words, options in (
        (model, adamw(model), "its dtype differs, float32 in place of bfloat16", {"dtype": "bfloat16"}),
        (model, one_group, "its parameters or their optimizer groups differ", {}),
        (shallow, adamw(shallow), "it has 3 blocks, this one 1", {}),
        (frozen, adamw(frozen), "its parameters or their optimizer groups differ", {}),
    ):
        refused(
            other, optimizer, batch, f"another model than LlamaForCausalLM: {words}", ValueError, plan=plan, **options
        )


def test_plans_that_do_not_suit(
    plan: Plan, no_memory_taken: None, tiny_model: Callable[..., nn.Module], tiny_batch: Callable[..., Batch]
) -> None:
    def attempt(words: str, kind: type[Exception], wrong: Plan, **options: Any) -> None:
        model = tiny_model(options.pop("family", "llama"))
        refused(model, adamw(model), options.pop("batch", tiny_batch()), words, kind, plan=wrong, **options)

    attempt("made for another model .*make a new plan, or leave plan= out", ValueError, plan, family="gpt2")
    attempt("made for another model .*dtype differ", ValueError, plan, dtype="bfloat16")
    elsewhere = dataclasses.replace(plan, model=f"{plan.model.partition('-')[0]}-0")
    attempt("made for another model .*the same parameters, but other modules use them", ValueError, elsewhere)
    attempt(
        "the plan does not fit the device .*leave the plan out", PlanError, plan, device_memory=plan.device_bytes - 1
    )
    attempt("the plan does not fit the host memory", PlanError, plan, host_memory=plan.host_bytes - 1)
    attempt("the plan does not fit the", PlanError, plan, device_memory=plan.device_bytes, batch=tiny_batch(batch=8))
    attempt("n_buffer must be", ValueError, dataclasses.replace(plan, n_buffer=99))
    attempt("the plan's block_modes name", ValueError, dataclasses.replace(plan, n_ckpt=0))


def test_predictions_of_a_given_plan_are_made_anew(
    model: nn.Module, tiny_batch: Callable[..., Batch], plan: Plan
) -> None:
    options: Any = {"device": "cpu", "device_memory": "1GiB", "plan": plan, "progress": False}
    _, optimizer = protrain.wrap(model, adamw(model), example_batch=tiny_batch(batch=8), **options)
    assert optimizer.plan.device_bytes > 1.5 * plan.device_bytes
    assert optimizer.plan.tokens == 4 * plan.tokens


# -- the C compiler ----------------------------------------------------------------------------------------------------

_TRAINING = """
    import hashlib, sys, torch, warnings
    import protrain

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
        batch = (torch.randn(4, 16),)
        model, optimizer = protrain.wrap(
            model, torch.optim.AdamW(model.parameters(), lr=1e-2), example_batch=batch, device="cpu",
            dtype="float32", device_memory="16KiB", host_memory="1GiB", progress=False,
        )
        print("at wrap:", sum("Falling back" in str(warning.message) for warning in caught))
        for _ in range(3):
            for _ in range(2):
                model(*batch).float().square().mean().backward()
            optimizer.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
        names = [name for name, _ in model.named_parameters()]
        weights = torch.cat([optimizer.export_parameter(name)["master"].view(-1) for name in names])
    told = [str(warning.message) for warning in caught if "Falling back" in str(warning.message)]
    print("in all:", len(told), *told)
    offloads = optimizer.plan.n_persist < optimizer.plan.n_chunks
    print("bits:", hashlib.sha256(weights.numpy().tobytes()).hexdigest(), offloads)
"""


def _trained(environment: dict[str, str]) -> dict[str, str]:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_TRAINING)],
        env={**environment, "PYTHONPATH": str(REPOSITORY), "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return dict(line.split(": ", 1) for line in result.stdout.splitlines())


def test_without_a_c_compiler_it_says_so_once_and_trains_the_same(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if name in ("HOME", "LD_LIBRARY_PATH", "TMPDIR")}
    empty = tmp_path / "bin"
    empty.mkdir()
    without = _trained({**kept, "PATH": str(empty), "PROTRAIN_CACHE": str(tmp_path / "cache")})
    assert without["at wrap"] == "1"
    assert without["in all"].startswith(
        "1 host kernels: no C compiler found. Falling back to separate torch operations"
    )
    assert "Install gcc or clang with OpenMP" in without["in all"]
    with_compiler = _trained({**kept, "PATH": os.environ["PATH"]})
    assert without["bits"] == with_compiler["bits"]
    assert without["bits"].endswith("True"), "nothing was offloaded"


def test_the_tests_see_warnings_as_users_do(model: nn.Module, batch: Batch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        protrain.wrap(model, adamw(model), example_batch=batch, device="cpu", progress=False)
