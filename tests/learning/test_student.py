"""Teacher and student: what they share, and the gradients that a whole model gives the logits."""

import pytest
import torch
from torch.nn import functional as F

from helpers.lab import draw
from helpers.sampler_truth import exact_mask, relative
from helpers.tiny_models import tiny_gpt2, tiny_llama, tiny_mamba, tiny_mixtral
from roi_lightning.errors import UserError
from roi_lightning.learning.losses import objective
from roi_lightning.learning.roi import RoILightningModule
from roi_lightning.samplers import Categorical, GumbelSubset, GumbelTopK, StraightThrough

IDS = torch.randint(0, 250, (2, 24), generator=torch.Generator().manual_seed(0))
SAMPLERS = [GumbelTopK(), GumbelTopK("scaled"), StraightThrough(), GumbelSubset(), Categorical()]


def learner_of(model, **options):
    """A learner in fp32 with random logits, whose student has the weights of a draw."""
    learner = RoILightningModule(str(model), **{"dtype": "float32"} | options)
    learner.configure_model()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for logits in learner.learned:
            logits.copy_(0.1 * torch.randn(logits.shape, generator=generator))
    draw(learner, lam=0.3, tau=0.5)
    return learner


MODELS = {"llama": tiny_llama, "gpt2": tiny_gpt2, "mixtral": tiny_mixtral, "mamba": tiny_mamba}
CASES = [("llama", sampler) for sampler in SAMPLERS]
CASES += [(kind, sampler) for kind in ("gpt2", "mixtral") for sampler in (GumbelTopK(), Categorical())]


@pytest.mark.filterwarnings("ignore:MambaForCausalLM has 4 matrices of a layout that is not known")
@pytest.mark.parametrize(("kind", "sampler"), [*CASES, ("mamba", GumbelTopK())], ids=str)
def test_gradients_are_those_of_plain_autograd_in_double_precision(tmp_path, kind, sampler):
    learner = learner_of(MODELS[kind](tmp_path / "m"), sampler=sampler)
    teacher, student = learner.models()
    objective(student, teacher, IDS, 0.4)[0].backward()
    found = {name: tensor.learned["logits"].grad for name, tensor in learner.tensors.items()}
    teacher.double()
    if kind == "mixtral":
        teacher.set_experts_implementation("eager")  # the only one in double precision
    logits = {
        name: tensor.whole("logits").double().requires_grad_() for name, tensor in learner.tensors.items()
    }
    weights = {}
    for name, tensor in learner.tensors.items():
        mask = exact_mask(sampler, logits[name], tensor.pattern, learner.draws[name])
        for layer, own in zip(tensor.layers.values(), mask.view(-1, *mask.shape[-2:]), strict=True):
            whole = weights.setdefault(layer.parameter, teacher.get_parameter(layer.parameter).clone())
            layer.view(whole).copy_(layer.of(teacher) * own)
    masked = torch.func.functional_call(teacher, weights, kwargs={"input_ids": IDS}).logits[:, :-1]
    with torch.no_grad():
        wanted = teacher(input_ids=IDS).logits[:, :-1].log_softmax(-1)
    log_p = masked.log_softmax(-1)
    nll = F.nll_loss(log_p.flatten(0, 1), IDS[:, 1:].flatten())
    divergence = F.kl_div(log_p, wanted, log_target=True, reduction="none").sum(-1).mean()
    exact = torch.autograd.grad(0.6 * nll + 0.4 * divergence, list(logits.values()))
    for name, gradient in zip(logits, exact, strict=True):
        assert relative(found[name], gradient) < 1e-4, name
        assert gradient.norm() > 0


def test_the_student_has_only_its_pruned_tensors_for_itself(tmp_path):
    learner = learner_of(tiny_llama(tmp_path / "m"), ignore=["k_proj"])
    teacher, student = learner.models()
    own = {layer.parameter for layer in learner.layers.values()}
    assert type(student) is type(teacher)
    assert [type(x) for x in student.modules()] == [type(x) for x in teacher.modules()]
    for name, parameter in teacher.named_parameters():
        assert (student.get_parameter(name) is parameter) == (name not in own)
        assert not parameter.requires_grad
    assert not any(type(x).__module__.startswith("roi_lightning") for x in student.modules())


def test_gradients_of_weights_are_freed_as_they_come(tmp_path):
    learner = learner_of(tiny_llama(tmp_path / "m"))
    teacher, student = learner.models()
    alive = []
    for tensor in learner.tensors.values():
        tensor.student.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(x.student.grad is not None for x in learner.tensors.values()))
        )
    objective(student, teacher, IDS, 0.0)[0].backward()
    assert alive == [0] * len(learner.tensors)


@pytest.mark.parametrize("options", [{"ignore": ["experts.2.*"]}, {"patterns": {"experts.2.w1": "1:4"}}])
def test_experts_of_a_block_are_learned_together(tmp_path, options):
    learner = RoILightningModule(str(tiny_mixtral(tmp_path / "m")), **options)
    with pytest.raises(UserError, match=r"the experts of .* are learned as one tensor"):
        learner.configure_model()
