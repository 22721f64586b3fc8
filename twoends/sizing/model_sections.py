"""The sections that a config alone answers: what a model holds, what a sequence carries, bytes of a token."""

from __future__ import annotations

from twoends.sizing.evidence import Figure, Unit, arithmetic, measured
from twoends.sizing.footprint import (
    MILLION_TOKENS,
    OUR_VALUE_BYTES,
    RELEASED_VALUE_BYTES,
    Footprint,
    bytes_by_format,
)
from twoends.sizing.ladder import LoadRow, draft_rows, load_rows
from twoends.sizing.report import Cell, Chart, Line, Question, Section, Series, Table
from twoends.sizing.routing import FORMULA, RoutingCurve, curve_of


def footprint_section(foot: Footprint) -> Section:
    """Parameters and bytes, by part and by format."""
    origin = foot.model.origin
    lines = (
        _line("parameters", "parameters", foot.parameters, "parameters", f"shapes of every tensor; {origin}"),
        _line(
            "active_parameters",
            "active for one token",
            foot.active_parameters,
            "parameters",
            "trunk + head + chosen experts; the embedding is looked up",
        ),
        _line("bytes", "released size", foot.num_bytes, "GB", "every tensor at its released format"),
        _line("expert_bytes", "one routed expert", foot.expert_bytes, "B", "three matrices and scales"),
        _line("trunk_bytes", "trunk, all layers", foot.trunk_bytes, "GB", "layers without routed experts"),
    )
    parts = tuple(
        (
            part.name,
            arithmetic(part.parameters, "parameters", "product of the shapes"),
            arithmetic(part.num_bytes, "GB", "values x bytes of their format"),
            arithmetic(part.num_bytes / foot.num_bytes, "share", "bytes / released size"),
        )
        for part in foot.parts
    )
    forms = tuple(
        (form, arithmetic(size, "GB", "bytes of all tensors of this format"))
        for form, size in bytes_by_format(foot.parts)
    )
    return Section(
        key="footprint",
        title="What it holds",
        lines=lines,
        tables=(
            Table(key="parts", title="by part", columns=("part", "parameters", "bytes", "share"), rows=parts),
            Table(key="formats", title="by format", columns=("format", "bytes"), rows=forms),
        ),
    )


def sequence_section(foot: Footprint, question: Question) -> Section:
    """State and latent cache of one sequence, against full attention of the same depth."""
    million = f"x {MILLION_TOKENS:,} tokens"
    context = question.context_tokens
    ours = foot.sequence_bytes(context, value_bytes=OUR_VALUE_BYTES)
    released = foot.sequence_bytes(context, value_bytes=RELEASED_VALUE_BYTES)
    config = foot.model.config
    kda, mla = len(config.kda_layers), len(config.mla_layers)
    heads = "layers x heads x (key + value) x 2 bytes"
    state = RELEASED_VALUE_BYTES * foot.state_values
    lines = (
        _line("state_bytes", f"state of {kda} KDA layers", state, "GiB", "heads x head^2 x 2 bytes a layer"),
        _line("cache_bytes_per_layer", "latent cache, token, layer", foot.cache_bytes_per_layer, "B",
              "(latent + shared key) x 2 bytes"),
        _line("cache_bytes_per_token", f"the same in {mla} MLA layers", foot.cache_bytes_per_token, "B",
              "MLA layers x the above"),
        _line("cache_bytes_at_1m", "cache at 1M tokens", foot.cache_bytes_per_token * MILLION_TOKENS, "GB",
              f"the above {million}"),
        _line("all_latent_bytes_at_1m", "if every layer were MLA",
              foot.all_latent_bytes_per_token * MILLION_TOKENS, "GB", f"all layers, {million}"),
        _line("all_heads_bytes_at_1m", "if every layer kept all heads",
              foot.all_heads_bytes_per_token * MILLION_TOKENS, "GB", f"{heads} {million}"),
        _line("released_sequence_bytes", f"one of {context:,} tokens, BF16", released, "bytes",
              "state + convolution tails + cache"),
        _line("our_sequence_bytes", "the same here, binary32", ours, "bytes", "twice: 4 bytes a value"),
    )  # fmt: skip
    return Section(key="sequence", title="What a sequence carries", lines=lines)


def bytes_section(foot: Footprint) -> Section:
    """Bytes of one token, by how many tokens share a pass, and with drafts."""
    curve = curve_of(foot.model)
    head = foot.head.num_bytes
    lines = (
        _line("bytes_per_token", "one token, nothing cached", foot.bytes_per_token, "GB",
              "trunk + chosen experts; embedding and head in memory"),
        _line("routed_bytes_per_token", "of it routed experts", foot.routed_bytes_per_token, "GB",
              "layers x chosen x bytes of one"),
        _line("floor_bytes_per_token", "and the head read as well", foot.bytes_per_token + head, "GB",
              "as this program reads at its floor"),
    )  # fmt: skip
    rows = load_rows(foot)
    tables = [_load_table(rows, curve)]
    config = foot.model.config
    notes = [f"By formula: {FORMULA}, E = {config.num_experts}, S = {config.experts_per_token}."]
    if curve is None:
        notes.append("No routing of this model was measured: for one text's tokens, the formula is a bound.")
    else:
        tables += _draft_tables(foot, curve)
        notes.append(
            "Measured columns hold for tokens of one text; independent sequences follow the formula."
        )
    return Section(
        key="bytes",
        title="Bytes of one token",
        lines=lines,
        tables=tuple(tables),
        charts=(_load_chart(rows),),
        notes=tuple(notes),
    )


def _load_table(rows: tuple[LoadRow, ...], curve: RoutingCurve | None) -> Table:
    columns = ["n", "distinct", "streamed", "resident"]
    if curve is not None:
        columns += ["one text: distinct", "one text: streamed", "one text: resident"]
    cells: list[tuple[Cell, ...]] = []
    for row in rows:
        line: list[Cell] = [
            f"{row.tokens}",
            arithmetic(round(row.distinct, 1), "count", FORMULA),
            arithmetic(row.streamed_bytes, "GB", "(trunk + layers x distinct x expert) / n"),
            arithmetic(row.resident_bytes, "GB", "layers x distinct x expert / n"),
        ]
        if curve is not None:
            real = (row.measured_distinct, row.measured_streamed_bytes, row.measured_resident_bytes)
            units: tuple[Unit, ...] = ("count", "GB", "GB")
            line += [
                ""
                if value is None
                else measured(round(value, 1) if unit == "count" else value, unit, curve.source)
                for value, unit in zip(real, units, strict=True)
            ]
        cells.append(tuple(line))
    return Table(
        key="loads", title="by n tokens that share a pass", columns=tuple(columns), rows=tuple(cells)
    )


def _draft_tables(foot: Footprint, curve: RoutingCurve) -> tuple[Table, Table]:
    """Acceptance down, drafts across; once with the trunk streamed, once with it resident."""
    found = draft_rows(foot, curve)
    drafts = sorted({row.drafts for row in found})
    columns = ("right", *(f"k={k}" for k in drafts))

    def table(key: str, place: str) -> Table:
        rows: list[tuple[Cell, ...]] = []
        for acceptance in sorted({row.acceptance for row in found}):
            gains = [getattr(row, f"{key}_gain") for row in found if row.acceptance == acceptance]
            rows.append((f"{acceptance:g}", *(_gain(gain, curve) for gain in gains)))
        return Table(
            key=f"drafts_{key}",
            title=f"gain in bytes by k drafts, {place} (below 1 is a loss)",
            columns=columns,
            rows=tuple(rows),
        )

    return table("streamed", "trunk streamed"), table("resident", "trunk resident")


def _gain(value: float, curve: RoutingCurve) -> Figure:
    how = "tokens a pass x bytes of one row / bytes of k + 1 rows; tokens a pass = 1 + a + ... + a^k"
    return arithmetic(value, "ratio", f"{how}; {curve.source}")


def _load_chart(rows: tuple[LoadRow, ...]) -> Chart:
    def series(name: str, field: str, *, dashed: bool = False) -> Series:
        points = tuple(
            (float(row.tokens), float(value)) for row in rows if (value := getattr(row, field)) is not None
        )
        return Series(name=name, points=points, dashed=dashed)

    curves = (
        series("trunk streamed", "streamed_bytes"),
        series("trunk resident", "resident_bytes"),
        series("streamed, one text (measured)", "measured_streamed_bytes", dashed=True),
        series("resident, one text (measured)", "measured_resident_bytes", dashed=True),
    )
    return Chart(
        key="bytes",
        title="Bytes of one token",
        about="Tokens that share a pass share its weights; the trunk is shared by all, experts by some.",
        x_label="tokens in a pass",
        y_label="bytes a token",
        x_unit="",
        y_unit="bytes",
        series=tuple(curve for curve in curves if curve.points),
    )


def _line(key: str, name: str, value: float, unit: Unit, source: str) -> Line:
    remark = f"{value:,.0f} B" if unit in ("GB", "GiB") else ""
    return Line(key=key, name=name, figure=arithmetic(value, unit, source), remark=remark)
