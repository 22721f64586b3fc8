"""twoends/cli/main.py and command.py: the table, and the edge where errors become codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from twoends.cli import main
from twoends.cli.command import parse
from twoends.cli.main import COMMANDS, load_command, overview

ROOT = Path(__file__).parents[2]


def test_alone_it_prints_every_verb_and_two_commands_to_paste(twoends):
    result = twoends()
    assert (result.code, result.out, result.err) == (0, overview() + "\n", "")
    assert all(f"  {verb} " in result.out for verb in COMMANDS)
    assert '\n  twoends run "Once upon a time"\n  twoends doctor\n' in result.out


@pytest.mark.parametrize("verb", COMMANDS)
def test_the_table_says_what_the_command_says(verb):
    command = load_command(verb)
    assert (command.name, command.phrase) == (verb, COMMANDS[verb])


@pytest.mark.parametrize("verb", COMMANDS)
def test_help_fits_eighty_columns(twoends, verb):
    result = twoends(verb, "--help")
    assert result.code == 0
    assert max(map(len, result.out.splitlines())) <= 80


def test_a_wrong_verb_gets_the_nearest_right_one(twoends):
    result = twoends("rnu")
    assert (result.code, result.out) == (2, "")
    assert result.err == (
        "twoends: there is no command 'rnu'.\n\n    nearest known name   run\n\n"
        "  See all commands:  twoends\n"
    )


def test_an_unknown_option_gets_the_nearest_right_one(twoends):
    result = twoends("run", "--thread", "2", "x")
    assert result.code == 2
    assert result.err == (
        "twoends: 'run' has no option --thread.\n\n    nearest known name   --threads\n\n"
        "  See all options:  twoends run --help\n"
        "  A word that begins with - and is no option goes after --\n"
    )


def test_words_after_two_dashes_are_no_options():
    values = parse(load_command("run"), ["-n", "3", "--", "MODEL", "--seed"])
    assert (values.model, values.prompt, values.n, values.seed) == ("MODEL", "--seed", 3, 0)


def test_options_may_stand_between_the_words():
    values = parse(load_command("run"), ["MODEL", "-n", "3", "- a list", "--stop=-x", "--stop", "y"])
    assert (values.model, values.prompt, values.n, values.stop) == ("MODEL", "- a list", 3, ["-x", "y"])
    assert values.given == {"n": ["3"], "stop": ["-x", "y"]}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "-n"], "twoends: -n needs a value:  -n N\n"),
        (["run", "--json=yes"], "twoends: --json takes no value.\n"),
        (["run", "-n", "zero", "x"], "twoends: -n: 'zero' is not a whole number.\n"),
        (["run", "-n", "0", "x"], "twoends: -n: 0 is too small; at least 1.\n"),
        (["run", "--ram", "8QB", "x"], "twoends: --ram: '8QB' is not a size.\n"),
        (["run", "--temperature", "hot", "x"], "twoends: --temperature: 'hot' is not a number.\n"),
        (["run", "--temperature", "nan", "x"], "twoends: temperature is nan; it must be a finite number.\n"),
        (["run", "--policy", "mru", "x"], "twoends: --policy is 'mru'; it must be one of decayed, lru.\n"),
        (["run", "--ids", "1,x"], "twoends: --ids: '1,x' is not a list of token ids.\n"),
        (["run", "a", "b", "c"], "twoends: 'run' does not know what to do with 'c'.\n"),
        (["tiny"], "twoends: 'tiny' needs DIR: where to write; new, or empty.\n"),
        (["bench", "disks"], "twoends: 'disks' can't be measured.\n"),
        (["bench", "replay"], "twoends: 'bench replay' needs a trace.\n"),
        (["bench", "ladder"], "twoends: 'bench ladder' needs a checkpoint's directory.\n"),
        (["bench", "kernels", "x"], "twoends: 'bench kernels' needs nothing after it.\n"),
        (["bench", "kernels", "-n", "3"], "twoends: 'bench kernels' has no use for -n.\n"),
        (["bench", "replay", "x", "--rungs", "1GB"], "twoends: 'bench replay' has no use for --rungs.\n"),
        (["bench", "replay", "x", "--capacities", "1/0"], "twoends: --capacities: '1/0' is not a number"),
        (["bench", "replay", "x", "--capacities", "0"], "twoends: --capacities: '0' is not a capacity"),
        (
            ["bench", "replay", "x", "--plot", "p.txt"],
            "twoends: --plot: p.txt must end in .png, .svg or .pdf.\n",
        ),
        (["--verbose"], "twoends: the first word must be a command; there is no option --verbose here.\n"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_asked_wrongly_is_refused_with_code_2(twoends, words, message):
    result = twoends(*words)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(message)


def test_an_unknown_environment_variable_of_ours_is_refused(twoends, monkeypatch):
    monkeypatch.setenv("TWOENDS_IAS", "plain")
    result = twoends("run", "x")
    assert result.code == 2
    assert result.err.startswith("twoends: the environment variable TWOENDS_IAS means nothing to twoends.\n")
    assert "nearest known name   TWOENDS_ISA" in result.err


def test_an_unforeseen_exception_is_called_a_defect_and_has_no_traceback(twoends, monkeypatch):
    monkeypatch.setattr(main, "overview", lambda: 1 // 0)
    result = twoends()
    assert result.code == 1
    assert result.err.startswith("twoends: this is a defect in twoends; the work was not finished.\n")
    assert "ZeroDivisionError" in result.err
    assert "Traceback" not in result.err


def test_memory_that_the_system_refuses_does_not_fit(twoends, monkeypatch):
    def refused() -> str:
        raise MemoryError

    monkeypatch.setattr(main, "overview", refused)
    result = twoends()
    assert result.code == 3
    assert result.err.startswith("twoends: the system refused this process more memory.\n")


def test_debug_shows_the_traceback(twoends, monkeypatch):
    monkeypatch.setattr(main, "overview", lambda: 1 // 0)
    assert "Traceback" in twoends("--debug").err


@pytest.mark.parametrize("package", ["torch", "tokenizers"])
def test_a_missing_extra_is_named(twoends, monkeypatch, package):
    def absent(verb: str) -> None:
        raise ModuleNotFoundError(f"No module named '{package}'", name=package)

    monkeypatch.setattr(main, "load_command", absent)
    result = twoends("train")
    assert result.code == 1
    assert result.err == (
        f"twoends: 'twoends train' needs {package}, which is not installed.\n\n"
        "  Install it:  pip install 'twoends[train]'\n"
    )


def test_help_loads_neither_numpy_nor_torch():
    program = (
        "import sys; from twoends.cli.main import call\n"
        "code = call(['run', '--help'], environment={})\n"
        "sys.exit(code or ' '.join({'numpy', 'torch', 'rich', 'typer'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stderr) == (0, "")


# Every option of every command. A new one is a promise to users: add it here when it is meant.
SURFACE = {
    "run": "MODEL PROMPT --ids -n --ram --threads --chunk --draft --draft-from --draft-model "
    "--context --look-ahead --policy --temperature --top-p --top-k --seed --stop --save "
    "--load --trace --save-profile --profile --expert-activations --latent-eps "
    "--source --kernels --no-direct --json",
    "batch": "MODEL INPUT OUTPUT --ram --sequences --threads --chunk --context --policy --trace "
    "--expert-activations --latent-eps --source --kernels --no-direct --json",
    "plan": "MODEL --ram --context --sequences --chunk --draft --look-ahead --profile --threads "
    "--kernels --latent-eps --source --json",
    "inspect": "MODEL --config --sizes --layer --verify --source --json",
    "doctor": "--disk --threads --kernels --json",
    "tiny": "DIR --preset --family --seed --layers --sparse --json",
    "pack": "MODEL OUT --code --experts --stripe --json",
    "bench": "WHAT OBJECT --threads --isa --capacities --order --also --model --save-profile --rungs "
    "--repeat -n --ids --cap --out --plot --json",
    "train": "RECIPE --preset --out --data --shakespeare --draft-of --resume --steps --minutes --ablation "
    "--cells --jobs --threads --json",
    "eval": "MODEL --text --ram --threads --context --chunk --trace --source --kernels --json",
}


@pytest.mark.parametrize("verb", SURFACE)
def test_the_surface_is_frozen(verb):
    command = load_command(verb)
    words = [a.name for a in command.arguments] + [o.flag for o in command.options]
    assert words == SURFACE[verb].split()
