"""From a question to a report."""

from __future__ import annotations

from twoends.errors import OptionError
from twoends.sizing.example import worked_example
from twoends.sizing.footprint import footprint
from twoends.sizing.machine_sections import fit_section, speed_section
from twoends.sizing.model_sections import bytes_section, footprint_section, sequence_section
from twoends.sizing.money_sections import example_section, money_section
from twoends.sizing.report import Question, Report, Section

_MAX_SEQUENCES = 1_000_000


def answer(question: Question) -> Report:
    """All sections. Raises OptionError for an impossible question, DoesNotFit where nothing has room."""
    check(question)
    foot = footprint(question.model)
    sections: list[Section] = [
        footprint_section(foot),
        sequence_section(foot, question),
        bytes_section(foot),
        fit_section(foot, question),
    ]
    machine = question.machine
    if machine is not None:
        sections.append(speed_section(foot, question, machine))
    sections.append(money_section(foot, question, machine))
    if question.model.release == "kimi-k3":
        sections.append(example_section(worked_example(question.machines, question.prices)))
    config = question.model.config
    kinds = f"{config.num_layers} layers ({len(config.kda_layers)} KDA, {len(config.mla_layers)} MLA)"
    load = f"{question.rows.sequences} x {question.context_tokens:,} tokens"
    if question.rows.drafts:
        load += f", {question.rows.drafts} drafts at {question.rows.acceptance:g}"
    return Report(title=question.model.name, subtitle=f"{kinds}; {load}", sections=tuple(sections))


def check(question: Question) -> None:
    """Raises OptionError for what no machine can do."""
    longest = question.model.max_context_tokens
    if question.context_tokens > longest:
        raise OptionError(
            f"--context {question.context_tokens:,} is impossible: the model ends at {longest:,} tokens.",
            evidence=[("config", question.model.origin)],
        )
    if question.context_tokens < 1:
        raise OptionError(f"--context is {question.context_tokens:,}; at least 1.")
    rows = question.rows
    if not 1 <= rows.sequences <= _MAX_SEQUENCES:
        raise OptionError(f"--sequences is {rows.sequences:,}; it must be 1 to {_MAX_SEQUENCES:,}.")
    if not 0 <= rows.acceptance <= 1:
        raise OptionError(f"--acceptance is {rows.acceptance:g}; it must be between 0 and 1.")
    if question.tokens_per_s is not None and not question.tokens_per_s > 0:
        raise OptionError(f"--tokens-per-s is {question.tokens_per_s:g}; it must be above zero.")
