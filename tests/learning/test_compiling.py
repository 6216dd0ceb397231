"""Compiled blocks and loss against the eager form, on tiny models."""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from helpers.lab import make_lab
from helpers.tiny_models import tiny_gemma3, tiny_gpt2, tiny_llama, tiny_mixtral
from roi_lightning.learning import losses
from roi_lightning.learning.compiling import Compiler
from roi_lightning.learning.losses import next_token_nll, objective
from roi_lightning.learning.student import student_of
from roi_lightning.models.layers import decoder_blocks, prunable_layers
from roi_lightning.models.loading import enable_checkpointing, freeze
from roi_lightning.utils.dtensor import full_tensor

lab = pytest.fixture(make_lab)
MAKERS = {"llama": tiny_llama, "gpt2": tiny_gpt2, "gemma3": tiny_gemma3, "mixtral": tiny_mixtral}


@pytest.fixture(autouse=True)
def _compile_anew():
    torch._dynamo.reset()
    losses._compiled.cache_clear()
    yield
    losses._compiled.cache_clear()
    torch._dynamo.reset()


class Backend:
    """Counts what is compiled, and runs it operation by operation."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, module, inputs):
        self.graphs += 1
        return aot_eager(module, inputs)


@pytest.fixture
def use(monkeypatch):
    """Puts another backend in the place of torch's."""
    plain = torch.compile

    def use(backend):
        monkeypatch.setattr(torch, "compile", partial(plain, backend=backend))
        return backend

    return use


class Pair:
    """A teacher and its student, whose weights are the teacher's and a little less."""

    def __init__(self, directory, kind="llama", checkpointing=False, **overrides):
        made = MAKERS[kind](directory / f"{kind}{len(list(directory.iterdir()))}", **overrides)
        self.teacher = freeze(AutoModelForCausalLM.from_pretrained(made))
        self.names = {layer.parameter for layer in prunable_layers(self.teacher).values()}
        self.student = student_of(self.teacher, self.names)
        with torch.no_grad():
            for name in self.names:
                self.student.get_parameter(name).copy_(0.9 * self.teacher.get_parameter(name))
        if checkpointing:
            enable_checkpointing(self.student)
        self.compiler = Compiler("blocks")

    @property
    def blocks(self):
        return [
            block for lm in (self.teacher, self.student) for block in lm.get_submodule(decoder_blocks(lm))
        ]

    def step(self, seed, batch=2, length=24):
        """The loss and gradients of one micro-batch."""
        ids = tokens(batch, length, seed)
        loss, _ = objective(self.student, self.teacher, ids, 0.5, ids, self.compiler.compiled)
        loss.backward()
        gradients = {name: full_tensor(self.student.get_parameter(name).grad) for name in self.names}
        self.student.zero_grad()
        return loss.detach(), gradients

    def prepare(self):
        self.compiler.prepare([self.teacher, self.student], lambda: self.step(0))

    def validate(self, batch, length):
        with torch.inference_mode():
            return next_token_nll(self.student, tokens(batch, length, 9))[0]


def tokens(batch, length, seed):
    return torch.randint(250, (batch, length), generator=torch.Generator().manual_seed(seed))


def compare(one, other, **tolerances):
    torch.testing.assert_close(one[0], other[0], **tolerances)
    for name, gradient in one[1].items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(other[1][name] / scale, gradient / scale, **tolerances)


@pytest.mark.parametrize(
    ("kind", "checkpointing"),
    [("gpt2", False), ("gemma3", False), ("mixtral", True)],
)
def test_a_compiled_step_is_the_eager_one_and_is_compiled_once(tmp_path, use, kind, checkpointing):
    pair = Pair(tmp_path, kind, checkpointing)
    eager, validated = [pair.step(seed) for seed in range(3)], pair.validate(3, 32)
    backend = use(Backend())
    pair.prepare()
    assert pair.compiler.compiled
    first = backend.graphs
    for seed, expected in enumerate(eager):
        compare(pair.step(seed), expected, rtol=1e-6, atol=1e-6)
    pair.prepare()
    assert backend.graphs == first, "the first step compiles all"
    torch.testing.assert_close(pair.validate(3, 32), validated, rtol=0, atol=0)
    pair.validate(5, 40)
    after, sizes = backend.graphs, [(3, 32), (4, 40), (5, 64), (6, 17), (7, 80)]
    assert after <= 2 * first
    for batch, length in sizes:
        pair.validate(batch, length)
    pair.step(4)
    assert backend.graphs == after, "no size is compiled for itself"


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_torch_compiles_has_the_loss_and_the_gradients_of_the_eager_form(tmp_path, checkpointing):
    pair = Pair(tmp_path, checkpointing=checkpointing)
    eager = [pair.step(seed) for seed in range(2)]
    pair.prepare()
    assert pair.compiler.compiled
    for seed, expected in enumerate(eager):
        compare(pair.step(seed), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("one_rank")
def test_a_sharded_model_is_compiled_in_blocks_that_share_their_code(tmp_path, use):
    pair, mesh = Pair(tmp_path, num_hidden_layers=9), init_device_mesh("cpu", (1,))
    eager = pair.step(1)
    for module in (*pair.blocks, pair.teacher, pair.student):
        fully_shard(module, mesh=mesh)
    backend = use(Backend())
    pair.prepare()
    first = backend.graphs
    assert 0 < first < 9
    compare(pair.step(1), eager, rtol=1e-6, atol=1e-6)
    assert pair.compiler.compiled
    assert backend.graphs == first


def broken(module, inputs):
    raise RuntimeError("no compiler was found\nin a long text")


def backwards_broken(module, inputs):
    compiled = aot_eager(module, inputs)

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            return tensor.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("no compiler was found")

    def run(*args):
        out = compiled(*args)
        return tuple(Broken.apply(x) if x.requires_grad else x for x in out)

    return run


def test_where_compilation_fails_the_eager_form_goes_on_and_the_reason_is_said(tmp_path, use):
    pair = Pair(tmp_path)
    eager = pair.step(1)
    use(broken)
    with pytest.warns(UserWarning, match="not compiled.*no compiler was found") as told:
        pair.prepare()
    assert len(told) == 1
    assert "\n" not in str(told[0].message)
    assert not pair.compiler.compiled
    pair.student.zero_grad()
    compare(pair.step(1), eager, rtol=0, atol=0)


def test_a_model_that_can_only_be_compiled_in_pieces_stays_as_it_is(tmp_path, use):
    pair = Pair(tmp_path)
    use(Backend())
    pair.blocks[0].mlp.register_forward_hook(lambda module, inputs, out: out * (2 if out.sum() > 0 else 3))
    eager = pair.step(1)
    with pytest.warns(UserWarning, match=re.compile("not compiled.*branching", re.IGNORECASE)):
        pair.prepare()
    compare(pair.step(1), eager, rtol=0, atol=0)


@pytest.mark.usefixtures("one_rank")
def test_all_ranks_leave_models_as_they_are_where_one_cannot_compile(tmp_path, use, monkeypatch):
    pair = Pair(tmp_path)
    use("eager")
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, operation: tensor.zero_())
    with pytest.warns(UserWarning, match="not compiled.*rank"):
        pair.prepare()
    assert not pair.compiler.compiled
    assert all(block._compiled_call_impl is None for block in pair.blocks)
    with pair.compiler.eager():
        pair.step(0)


def test_a_run_whose_blocks_are_compiled_learns_what_one_in_eager_form_does(lab, use):
    options = {"trainer": {"accumulate_grad_batches": 2}, "kept_norm": 0.5, "distillation": 0.3}
    plain, _ = lab.learn(3, dtype="float32", compile="none", **options)
    backend, graphs = use(Backend()), []
    seen = LambdaCallback(on_train_batch_end=lambda *_: graphs.append(backend.graphs))
    compiled, _ = lab.learn(3, dtype="float32", compile="blocks", callbacks=[seen], **options)
    assert graphs == graphs[:1] * 6
    assert graphs[0]
    for name, tensor in plain.tensors.items():
        ours, theirs = (x.learned["logits"] for x in (tensor, compiled.tensors[name]))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_a_run_that_can_not_be_compiled_is_the_eager_one(lab, use):
    plain, _ = lab.learn(2, compile="none", distillation=0.3)
    use(backwards_broken)
    with pytest.warns(UserWarning, match="not compiled.*no compiler was found"):
        eager, _ = lab.learn(2, compile="blocks", distillation=0.3)
    for name, tensor in plain.tensors.items():
        assert torch.equal(tensor.learned["logits"], eager.tensors[name].learned["logits"])


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_nothing_is_compiled_nor_tried_unasked(tmp_path, use, choice):
    backend, pair = use(Backend()), Pair(tmp_path)
    pair.compiler = Compiler(choice)
    pair.compiler.prepare([pair.teacher, pair.student], lambda: pytest.fail("tried"))
    pair.step(0)
    assert backend.graphs == 0


def test_a_compiled_model_generates_what_it_did(tmp_path, use):
    pair, prompt = Pair(tmp_path), tokens(2, 8, 3)

    def generate():
        return pair.student.eval().generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6)

    expected, backend = generate(), use(Backend())
    pair.student.train()
    pair.prepare()
    first = backend.graphs
    with pair.compiler.eager():
        assert torch.equal(generate(), expected)
    assert backend.graphs == first
