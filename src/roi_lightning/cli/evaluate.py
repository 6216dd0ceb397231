"""`evaluate LM …`: perplexities and tasks of lm-evaluation-harness, side by side."""

from rich.text import Text

from roi_lightning.cli.arguments import EvaluateOptions
from roi_lightning.evaluation.evaluated_models import dense_name, resolve_evaluated
from roi_lightning.evaluation.report import as_json, caption
from roi_lightning.evaluation.results_table import make_table
from roi_lightning.evaluation.run import evaluate_models
from roi_lightning.utils.atomic_io import check_writable, write_json, written_aside
from roi_lightning.utils.devices import choose_device
from roi_lightning.utils.tables import standard_output


def main(options: EvaluateOptions) -> None:
    """Check everything, measure, print the table, and write what was asked for.

    Raises:
        UserError: For whatever can't be measured or written; nothing is written then.
    """
    device, trusted = choose_device(options.device), options.trust_remote_code
    for out in filter(None, (options.json, options.markdown)):
        check_writable(out)
    models = resolve_evaluated(options.lm, options.base, trusted)
    dense = dense_name(models, options.base)
    evaluation = evaluate_models(
        models, options, lambda model: model.load(options.dtype, device, trusted), dense
    )
    table, below = make_table(evaluation), caption(evaluation)
    if options.json:
        write_json(options.json, as_json(evaluation, device=str(device)))
    if options.markdown:
        with written_aside(options.markdown) as partial:
            partial.write_text(f"{table.markdown()}\n\n{below}\n", encoding="utf-8")
    table.print()
    standard_output().print(Text(below, "dim"))
