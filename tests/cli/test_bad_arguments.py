"""Bad arguments of every command are refused in one line before a model is loaded or a folder is
written.
"""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

import headwise as hw
from headwise import cli
from headwise.attention.backends import backend_report
from headwise.cli.argument_checks import read_head_counts
from headwise.costs.activations import BACKEND_PROFILES
from headwise.hub import pretrained_models
from headwise.models import save_load
from headwise.util.errors import SpecError
from headwise.viewer import model_targets, view
from support.transformers_models import FALLBACK, ZOO, transformers

# The files that the arguments name; `model` looks like a folder of a model, so that only loading it
# would show that it is not one.
FILES = {
    "model/headwise.toml": "format = 1\n",
    "texts.txt": "one\ntwo\nthree\n",
    "empty.txt": "",
    "full/file": "here",
    "no_model/notes.txt": "here",
    "requests.jsonl": '{"prompt": "one"}\n',
    "run/checkpoint/step": "here",
    "done/headwise.toml": "format = 1\n",
    "study.toml": 'hypothesis = "h"\n[variants.mha]\n[tasks.recall]\n',
    "config.json": '{"model_type": "gpt2"}',
    "gpt2/config.json": '{"model_type": "gpt2", "n_layer": 2, "n_head": 4}',
    "vit/config.json": '{"model_type": "vit", "patch_size": 8, "image_size": 32}',
    "part.py": "",
    "curves/curves.json": "{}",
    "pruned/heads.json": "{}",
}
TEXTS = "--data texts.txt"
PRUNE = f"prune model {TEXTS} --out new"
CONVERT = f"convert model {TEXTS} --out new"
SWEEP = f"prune model --sweep {TEXTS} --out new"
TRACE = "trace model --text one --out a.trace"

# Of every command that reads a model: the arguments after its name that make a run, where MODEL is
# replaced.
MODEL_COMMANDS = {
    "run": "run MODEL one",
    "heads": f"heads MODEL {TEXTS}",
    "prune": f"prune MODEL {TEXTS} --keep 0.5 --out new",
    "prune --sweep": f"prune MODEL --sweep {TEXTS} --out new",
    "convert": f"convert MODEL {TEXTS} --kv 1 --out new",
    "trace": "trace MODEL --text one --out a.trace",
}
BAD_MODELS = {
    "nowhere": "there is no folder or file 'nowhere'; give a folder with a model",
    "no_model": (
        "no_model contains neither headwise.toml nor config.json; give a folder with a model"
    ),
    "gqa": (
        "gqa is a preset, without weights; train a model with it: headwise train TASK --model "
        "gqa --out DIR"
    ),
    "config.json": "config.json is no model; give the folder of one",
    "layer.toml": "layer.toml describes one attention layer, without weights",
    "whole.toml": "whole.toml describes a model, without weights",
}
MODEL_CASES = [
    (line.replace("MODEL", name), message)
    for line in MODEL_COMMANDS.values()
    for name, message in BAD_MODELS.items()
]

CASES = [
    # learn
    (
        "learn sofmax",
        "there is no document, topic or entry 'sofmax'; did you mean 'softmax-scale'?",
    ),
    # run
    ("run model one --batch 0", "--batch 0 is too small; give 1 or more"),
    ("run model one --max-new-tokens 0", "--max-new-tokens 0 is too small"),
    ("run model one --temperature -1", "--temperature -1 is too small; give 0 or more"),
    ("run model one --temperature nan", "--temperature nan is too small"),
    ("run model one --top-k 0", "--top-k 0 is too small"),
    ("run model one --top-p 1.5", "--top-p 1.5 is no share; give a number above 0, and at most 1"),
    ("run model one --min-p 2", "--min-p 2 is no share"),
    ("run model one --beams 0", "--beams 0 is too small"),
    ("run model one --best 0", "--best 0 is too small"),
    ("run model one --beams 2 --best 3", "--best 3 is more than --beams 2; give --beams 3"),
    ("run model one --window 0", "--window 0 is too small"),
    ("run model one --repetition 0", "--repetition 0 is out of range; give a number above 0"),
    ("run model one --compile of", "--compile 'of' is unknown; did you mean 'off'?"),
    ("run model one --device gpu", "gpu"),
    (
        "run model one --tokenizer none.json",
        "there is no file 'none.json' for --tokenizer; give a tokenizer.json",
    ),
    ("run model --score none.txt", "there is no file 'none.txt' for --score"),
    ("run model --score-tokenize zh", "--score-tokenize needs --score; add --score REF"),
    ("run model --requests none.jsonl", "there is no file 'none.jsonl' for --requests"),
    ("run model --requests full", "--requests full is a folder; give a file"),
    ("run model --requests requests.jsonl --rows 0", "--rows 0 is too small"),
    ("run model --requests requests.jsonl --chunk 0", "--chunk 0 is too small"),
    ("run model --requests requests.jsonl --budget lots", "lots"),
    ("run model one --rows 3", "--rows applies to --requests only"),
    # sites
    ("sites nowhere", "there is no preset, file or folder 'nowhere'"),
    ("sites gqaa", "did you mean 'gqa'?"),
    # heads
    ("heads model --data none.txt", "there is no file 'none.txt' for --data; give one that exists"),
    ("heads model --data empty.txt", "--data empty.txt is empty; give a file with text"),
    ("heads model --data full", "--data full is a folder; give a file"),
    ("heads model --conllu none.conllu", "there is no file 'none.conllu' for --conllu"),
    ("heads model --align texts.txt texts.txt none", "there is no file 'none' for --align"),
    ("heads model --task date", "--task 'date' is unknown; did you mean 'dates'?"),
    (f"heads vit {TEXTS}", "vit reads images, and --data gives text; give --images PATH"),
    ("heads vit --text one", "vit reads images, and --text gives text; give --images PATH"),
    (f"heads model {TEXTS} --limit 1", "--limit 1 is too few"),
    (
        f"heads model {TEXTS} --importance michl",
        "--importance 'michl' is unknown; did you mean 'michel'?",
    ),
    (
        f"heads model {TEXTS} --sort entropie",
        "--sort 'entropie' is unknown; did you mean 'entropy'?",
    ),
    (f"heads model {TEXTS} --sort importance", "--sort 'importance' is unknown"),
    (f"heads model {TEXTS} --criteria voit", "--criteria 'voit' is unknown; did you mean 'voita'?"),
    (f"heads model {TEXTS} --draw L3", "'L3' is not a head"),
    (f"heads gpt2 {TEXTS} --draw L2H0 --out new", "L2H0: gpt2 has no layer 2; its layers are 0..1"),
    (
        f"heads gpt2 {TEXTS} --draw L1H4 --out new",
        "L1H4: gpt2 has no head 4; the heads of a layer are 0..3",
    ),
    (
        f"heads model {TEXTS} --out pruned",
        "cannot write to pruned: it exists; replace it with --overwrite",
    ),
    (f"heads model {TEXTS} --draw L0H1", "--draw needs a folder for the figures; add --out DIR"),
    (
        f"heads model {TEXTS} --out texts.txt",
        "cannot write to texts.txt: it is a file; give the path of a new folder",
    ),
    (f"heads model {TEXTS} --pair a b --out new", "--pair a b is not two heads"),
    (f"heads model {TEXTS} --budget 0", "--budget 0 is out of range; give a number above 0"),
    (
        "heads none.trace --draw L0H1 --out new",
        "there is no file 'none.trace'; give one that exists",
    ),
    ("heads gpt2 --text one --show norm", "--show 'norm' is unknown; did you mean 'norms'?"),
    ("heads gpt2 --text one --over sums", "--over 'sums' is unknown; did you mean 'sum'?"),
    (
        "heads gpt2 --text one --show points",
        "--show points needs a head; add --head L3H2, for example",
    ),
    (
        "heads gpt2 --text one --show rollout --over max",
        "--over belongs to --show weights or norms; leave it out",
    ),
    (
        "heads gpt2 --text one --show rollout --head L0H1",
        "--head belongs to --show weights or norms or points",
    ),
    ("heads gpt2 --text one --head L0H1 --over max", "--over combines heads, and --head shows one"),
    ("heads gpt2 --text one --head one", "'one' is not a head"),
    ("heads gpt2 --text one --top 0", "--top 0 is too small; give 1 or more"),
    ("heads gpt2 --text one --token 3", "--token belongs to --show logits; leave it out"),
    (
        "heads gpt2 --text one --compare-text two --show norms",
        "--show and a comparison are two views",
    ),
    ("heads gpt2 --text one --compare-model nowhere", "there is no folder or file 'nowhere'"),
    (
        "heads gpt2 --text one --data texts.txt",
        "--data needs many texts, and --text gives one; leave one of them out",
    ),
    (
        "heads gpt2 --text one --importance michel",
        "--importance needs many texts, and --text gives one",
    ),
    (f"heads gpt2 {TEXTS} --show norms", "--show is for one text; add --text TEXT"),
    # prune
    (
        f"{PRUNE} --keep 1.5",
        "--keep 1.5 is out of range; give a share below 1, such as 0.5, or a number of heads",
    ),
    (f"{PRUNE} --keep 0", "--keep 0 is out of range"),
    (f"{PRUNE} --keep -0.5", "--keep -0.5 is out of range"),
    (f"{PRUNE} --keep half", "--keep half is not a share or number of heads"),
    (f"{PRUNE} --keep nan", "--keep nan is out of range"),
    (
        f"{PRUNE} --heads 0-1",
        "--heads 0-1 is not a list of heads; write LAYER:HEADS or SITE:HEADS, as in 0:1,3",
    ),
    (f"{PRUNE} --heads 0:1 1:x", "--heads 1:x is not a list of heads"),
    (f"{PRUNE} --budget cash=0.5", "--budget 'cash' is unknown; did you mean 'cache'?"),
    (f"{PRUNE} --budget cache", "--budget cache is not a budget; write KIND=LIMIT"),
    (
        f"{PRUNE} --budget cache=0",
        "--budget cache=0 cannot be met; give a limit above 0, as in cache=0.7",
    ),
    (
        f"{PRUNE} --budget time=1.2",
        "--budget time=1.2 cannot be met; give a limit above 0 and below 1",
    ),
    (
        f"{PRUNE} --budget cache=1.5",
        "--budget cache=1.5 is no share and no number of bytes per token",
    ),
    (
        f"{PRUNE} --budget parameters=2.5",
        "is no share and no number of parameters; give a share below 1, or a number",
    ),
    (f"prune gpt2 {TEXTS} --heads 2:0 --out new", "2:0: gpt2 has no layer 2; its layers are 0..1"),
    (
        f"prune gpt2 {TEXTS} --heads 1:0,4 --out new",
        "1:0,4: gpt2 has no head 4; the heads of a layer are 0..3",
    ),
    (
        f"prune model {TEXTS} --keep 0.5 --out pruned",
        "cannot write to pruned: it contains heads.json, which is not part of a pruned or",
    ),
    (f"{PRUNE} --plan nowhere", "there is no folder 'nowhere' for --plan"),
    (f"{PRUNE}", "choose heads by exactly one of --keep"),
    (f"{PRUNE} --keep 0.5 --by michl", "--by 'michl' is unknown; did you mean 'michel'?"),
    (f"{PRUNE} --keep 0.5 --per layers", "--per 'layers' is unknown; did you mean 'layer'?"),
    (f"{PRUNE} --keep 0.5 --unit heads", "--unit 'heads' is unknown; did you mean 'head'?"),
    (f"{PRUNE} --keep 0.5 --fold bia", "--fold 'bia' is unknown; did you mean 'bias'?"),
    (f"{PRUNE} --keep 0.5 --min-heads -1", "--min-heads -1 is too small; give 0 or more"),
    (f"{PRUNE} --keep 0.5 --sample 1", "--sample 1 is too small; give 2 or more"),
    (f"{PRUNE} --keep 0.5 --gates 0", "--gates 0 is too small"),
    (f"{PRUNE} --budget cache=0.5 --rerank-every 0", "--rerank-every 0 is too small"),
    (
        f"{PRUNE} --budget cache=0.5 --state no/where.json",
        "cannot write to no/where.json: the folder ",
    ),
    (
        f"{PRUNE} --keep 0.5 --objective drif",
        "--objective 'drif' is unknown; did you mean 'drift'?",
    ),
    (
        f"{PRUNE} --keep 0.5 --set digits=3",
        "--set digits=3 sets a field of a task; add --task NAME",
    ),
    (
        "prune model --keep 0.5 --task dates --set digit=3 --out new",
        "'dates' has no option 'digit'",
    ),
    (
        f"prune model {TEXTS} --keep 0.5 --out full",
        "cannot write to full: it contains file, and is not a pruned or converted model of "
        "headwise",
    ),
    (
        f"prune model {TEXTS} --keep 0.5 --out texts.txt",
        "cannot write to texts.txt: it is a file; give the path of a new folder",
    ),
    ("prune model --data none.txt --keep 0.5 --out new", "there is no file 'none.txt' for --data"),
    # prune --sweep
    (f"{SWEEP} --points 0.5,1.5", "--points 1.5 is no share; give a number above 0, and at most 1"),
    (f"{SWEEP} --points half", "--points half are not shares of heads"),
    (f"{SWEEP} --by michel randm", "--by 'randm' is unknown; did you mean 'random'?"),
    (
        f"{SWEEP} --by gates",
        "--by gates needs the steps that gates are trained for; add --gates STEPS",
    ),
    (f"{SWEEP} --answers rndom", "--answers 'rndom' is unknown; did you mean 'random'?"),
    (f"{SWEEP} --max-loss-rise 0", "--max-loss-rise 0 is out of range"),
    (f"{SWEEP} --random-orders 0", "--random-orders 0 is too small"),
    (f"{SWEEP} --unit heads", "--unit 'heads' is unknown"),
    (f"prune model --sweep {TEXTS} --out full", "cannot write to full"),
    (
        f"prune model --sweep {TEXTS} --out curves",
        "cannot write to curves: it exists; replace it with --overwrite",
    ),
    # convert
    (
        f"convert gpt2 {TEXTS} --kv 3 --out new",
        "--kv 3 does not divide the 4 key-value heads of gpt2; use one of [1, 2",
    ),
    (f"{CONVERT} --to collaborative", "--to collaborative is not a known form"),
    (f"{CONVERT} --to routed=1", "--to routed=1 is not a known form"),
    (
        f"{CONVERT} --to mha --align",
        "--align and --grouping apply to --kv only; leave them out with --to mha",
    ),
    (f"{CONVERT} --kv 0", "--kv 0 is too small; give 1 or more"),
    (f"convert gpt2 {TEXTS} --kv 0 --out new", "--kv 0 is too small; give 1 or more"),
    (f"{CONVERT} --to collaborative=0", "--to collaborative 0 is too small; give 1 or more"),
    (
        f"convert gpt2 {TEXTS} --to routed=4,2 --out new",
        "--to routed=4,2 needs 6 heads, and a layer of gpt2 has 4; give two numbers with a sum of "
        "at most 4",
    ),
    (
        f"convert vit {TEXTS} --kv 2 --out new",
        "vit reads images, and --data gives text; use hw.prune or hw.convert",
    ),
    (
        f"convert part.py {TEXTS} --kv 2 --out new",
        "part.py is Python code, and this command reads folders with models; for an nn.Module of "
        "your own, call "
        "headwise.convert_module(model, 2, example) in Python, and name your parts with --import",
    ),
    (
        "prune part.py:make --data texts.txt --keep 0.5 --out new",
        "call headwise.prune_module(model, [(0, 1)], example)",
    ),
    (
        f"heads part.py {TEXTS}",
        "part.py is Python code, not a model; give a folder with a model, and parts by --import",
    ),
    (f"{CONVERT} --to lattent", "--to lattent is not a known form"),
    (f"{CONVERT} --kv 1 --align side", "--align 'side' is unknown"),
    (
        f"{CONVERT} --kv 1 --grouping simlar",
        "--grouping 'simlar' is unknown; did you mean 'similar'?",
    ),
    (f"{CONVERT} --kv 1 --score cos", "--score 'cos' is unknown"),
    (f"{CONVERT} --kv 1 --where selff", "--where 'selff' is unknown; did you mean 'self'?"),
    (f"{CONVERT} --to routed=1,1 --by michl", "--by 'michl' is unknown; did you mean 'michel'?"),
    (f"{CONVERT} --kv 1 --uptrain 0", "--uptrain 0 is too small"),
    (f"{CONVERT} --kv 1 --uptrain 3 --lr 0", "--lr 0 is out of range"),
    (
        f"{CONVERT} --kv 1 --uptrain 3 --distill-data none",
        "there is no file 'none' for --distill-data",
    ),
    (
        f"{CONVERT} --kv 1 --uptrain 3 --distill-examples 1",
        "--distill-examples 1 is too small; give 2 or more",
    ),
    (f"{CONVERT} --kv 1 --length 0", "--length 0 is too small"),
    (f"{CONVERT} --kv 1 --seconds 0", "--seconds 0 is out of range"),
    (f"convert model {TEXTS} --kv 1 --out full", "cannot write to full"),
    # trace
    (
        "trace model one --out a.trace",
        "unexpected argument 'one'; leave it out, or give a text as --text 'one'",
    ),
    (f"{TRACE} --record w", "--record 'w' is unknown; use one of v, z"),
    (f"{TRACE} --precision haf", "--precision 'haf' is unknown; did you mean 'half'?"),
    (
        f"{TRACE} --export a.txt",
        "--export a.txt has none of the suffixes .csv, .json, .npz; give one of these",
    ),
    (f"{TRACE} --min-weight -1", "--min-weight -1.0 is not a weight"),
    (f"{TRACE} --new-tokens -1", "--new-tokens -1 is too small"),
    (f"{TRACE} --budget lots", "lots"),
    (f"{TRACE} --text two --target three", "--target needs exactly one --text"),
    ("trace model --text one --out no/where.trace", "cannot write to no/where.trace"),
    ("trace model --data none.txt --out a.trace", "there is no file 'none.txt' for --data"),
    ("trace none.trace", "there is no file 'none.trace'; give one that exists"),
    # view
    ("view gqa", "gqa is a preset, without weights"),
    ("view layer.toml", "layer.toml describes one attention layer, without weights"),
    ("view no_model", "no_model contains neither headwise.toml nor config.json"),
    ("view none.trace", "there is no file 'none.trace'; give one that exists"),
    ("view none.py:make", "there is no file 'none.py'; give one that exists"),
    ("view model --export page.txt", "--export page.txt is not an HTML file"),
    ("view model --export no/page.html", "cannot write to no/page.html"),
    (
        "view model --out texts.txt",
        "cannot write to texts.txt: it is a file; give the path of a new folder",
    ),
    ("view model --port -1", "--port -1 is not a port"),
    # train
    ("train datess --out new", "there is no task, file or folder 'datess'; did you mean 'dates'?"),
    ("train --data none.txt --out new", "there is no file or folder 'none.txt' for --data"),
    (
        "train dates --out run --model model",
        "run holds a run; continue it with --resume, or give another folder",
    ),
    ("train dates --out done --model model", "done already holds a model; give another folder"),
    (
        "train dates --out texts.txt --model model",
        "cannot write to texts.txt: it is a file; give the path of a new folder",
    ),
    (
        "train dates --out new --model no_model",
        "no_model contains neither headwise.toml nor config.json",
    ),
    (
        "train dates --out new --model gqaa",
        "there is no preset, file or folder 'gqaa'; did you mean 'gqa'?",
    ),
    (
        "train dates --out new --model model --recipe none.toml",
        "there is no file 'none.toml' for --recipe",
    ),
    ("train dates --out new --model model --steps 0", "--steps 0 is too small"),
    ("train dates --out new --model model --batch 0", "--batch 0 is too small"),
    ("train dates --out new --model model --lr 0", "--lr 0 is out of range"),
    (
        "train dates --out new --model model --logger tensorbord",
        "--logger 'tensorbord' is unknown; did you mean 'tensorboard'?",
    ),
    ("train dates --out new --model model --set task.digit=3", "'dates' has no option 'digit'"),
    ("train dates --out new --model model --set recipe.lrr=3", "a recipe has no field 'lrr'"),
    # study
    ("study none.toml", "there is no file 'none.toml'; give one that exists"),
    ("study full", "FILE full is a folder; give a file"),
    ("study study.toml --scale huge", "has no scale 'huge'"),
    (
        "study study.toml --out texts.txt",
        "cannot write to texts.txt: it is a file; give the path of a new folder",
    ),
    ("study study.toml --jobs -1", "--jobs -1 is negative"),
    ("study study.toml --budget 0", "--budget 0 is no number of hours"),
    # commands without weights
    ("spec nowhere.toml", "there is no file 'nowhere.toml'"),
    ("cost gqaa", "did you mean 'gqa'?"),
    ("cost nowhere/config.json", "there is no file 'nowhere/config.json'"),
    ("walk mha --batch x", "--batch needs a whole number, got 'x'"),
    ("why mha --want weight", "did you mean 'weights'?"),
    (
        "why gpt3",
        "gpt3 is a whole model, and one layer is needed; give a .toml or .json file, or a preset",
    ),
    (
        "spec mha --set modifiers=[{part=Rotary}]",
        "[{part=Rotary}] is no TOML value; quote it so that its quotes stay",
    ),
    ("demo --out texts.txt", "cannot write to texts.txt"),
]
# Mistakes that are found before torch is imported.
LIGHT = (
    "run model one --batch 0",
    "run model one --top-p 1.5",
    "run model --score none.txt",
    "run nowhere one",
    "heads model --data none.txt",
    "heads model --data empty.txt",
    f"heads model {TEXTS} --budget 0",
    "heads gpt2 --text one --show norm",
    f"heads gpt2 {TEXTS} --show norms",
    f"{PRUNE} --min-heads -1",
    f"{CONVERT} --kv 0",
    f"{SWEEP} --max-loss-rise 0",
    "study none.toml",
    "study study.toml --jobs -1",
    "view model --port -1",
    "walk mha --batch x",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the files that the arguments name."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "layer.toml").write_text(hw.to_toml(hw.design(model=8, heads=2)))
    model = hw.families.read_model_spec(
        {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}
    )
    (tmp_path / "whole.toml").write_text(hw.model_spec.to_toml(model))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def loaded(*args: object, **options: object) -> NoReturn:
    raise AssertionError(f"a model was loaded: {args}")


@pytest.fixture(scope="module")
def all_modules() -> None:
    """Import everything: a module that is imported while loading is patched would keep the patched
    functions.
    """
    for module in pkgutil.walk_packages(hw.__path__, "headwise."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


@pytest.fixture
def no_loading(all_modules: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading any model fails the test."""
    for module, name in (
        (hw, "load"),
        (hw.hub, "load"),
        (hw.models, "load"),
        (hw.models, "build"),
        (pretrained_models, "load"),
        (pretrained_models, "load_original"),
        (save_load, "load"),
        (model_targets, "load_target"),
        (view, "load_target"),
    ):
        monkeypatch.setattr(module, name, loaded, raising=False)


@pytest.mark.parametrize(
    ("line", "message"), [*CASES, *MODEL_CASES], ids=[line for line, _ in [*CASES, *MODEL_CASES]]
)
@pytest.mark.usefixtures("no_loading")
def test_bad_arguments_are_refused_before_a_model_is_loaded(
    capsys, folder: Path, line: str, message: str
):
    before = sorted(folder.rglob("*"))
    code = cli.main(line.split())
    captured = capsys.readouterr()
    assert (code, captured.out, captured.err.count("\n")) == (2, "", 1)
    assert message in captured.err
    assert sorted(folder.rglob("*")) == before


def test_every_command_is_in_the_table():
    assert {line.split()[0] for line, _ in [*CASES, *MODEL_CASES]} == set(cli.COMMANDS)


@pytest.mark.parametrize(
    "line", [line.replace("MODEL", "model") for line in MODEL_COMMANDS.values()]
)
@pytest.mark.usefixtures("no_loading")
def test_good_arguments_reach_the_loading_that_is_patched(capsys, folder: Path, line: str):
    assert cli.main(line.split()) == 3
    assert "a model was loaded" in capsys.readouterr().err


def test_mistakes_are_found_without_torch(folder: Path):
    code = "import sys\nfrom headwise.cli import main\nfor line in sys.stdin.read().splitlines():\n"
    code += (
        "    assert main(line.split()) == 2, line\n    assert 'torch' not in sys.modules, line\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], input="\n".join(LIGHT), capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    lines = [line for line in ran.stderr.splitlines() if line.startswith("headwise: ")]
    assert len(lines) == len(LIGHT)


@pytest.mark.parametrize("family", sorted(ZOO | FALLBACK))
def test_counts_of_a_config_are_those_of_its_spec(tmp_path: Path, family: str):
    """Of every family: the number of layers and of their heads, or None."""
    model = (ZOO | FALLBACK)[family]
    getattr(transformers, model.config)(**model.keys).save_pretrained(tmp_path)
    counts = read_head_counts(str(tmp_path))
    try:
        spec = hw.families.read_model_spec(tmp_path / "config.json")
    except SpecError:
        return
    layers = [one.heads for _, one in spec.attention_specs()]
    if len(spec.stacks) > 1:
        assert counts is None
        return
    assert counts is not None
    assert (counts.layers, {counts.heads}) == (len(layers), {heads.q for heads in layers})
    assert counts.kv is None or {counts.kv} == {heads.kv for heads in layers}


def test_other_configs_have_no_counts(tmp_path: Path):
    for text in (
        "not json",
        "[]",
        '{"n_layer": 2}',
        '{"n_layer": 2, "n_head": 4, "is_encoder_decoder": true}',
    ):
        (tmp_path / "config.json").write_text(text)
        assert read_head_counts(str(tmp_path)) is None
    (tmp_path / "config.json").write_text('{"n_layer": 2, "n_head": 4}')
    assert read_head_counts(str(tmp_path)) == (2, 4, 4)
    (tmp_path / "heads.json").write_text("{}")
    assert read_head_counts(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("command", "option", "names"),
    [
        ("cost", "--profile", BACKEND_PROFILES),
        ("why", "--when", backend_report.STATES),
    ],
)
def test_help_lists_every_name(
    capsys, monkeypatch, command: str, option: str, names: tuple[str, ...]
):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help-all"])
    entry = capsys.readouterr().out.partition(f"  {option} ")[2].partition("  --")[0]
    assert [name for name in names if name not in entry] == []
