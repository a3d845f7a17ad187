"""Reactions as SMILES with known atom mappings, and the mapping that attention weights imply.

The mapping is that of rxnmapper (Schwaller et al. 2021, Science Advances 7, eabe4166): product
atoms are assigned one by one to the precursor atom of their element with the largest weight, and
each assignment raises the weights between the neighbours of the two atoms.

    pip install rdkit
    python studies/pages/reactions.py

writes reactions.tsv: reactions of ten kinds from building blocks, canonical and sorted as
rxnmapper does. The mapping is known because the blocks are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

FILE = Path(__file__).with_name("reactions.tsv")
Array = NDArray[Any]
ATOM = r"\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\*"
TOKEN = re.compile(rf"({ATOM}|\(|\)|\.|=|#|-|\+|\\|/|:|~|@|\?|>>?|\$|%[0-9]{{2}}|[0-9])")
IS_ATOM = re.compile(f"(?:{ATOM})$")
ELEMENT = re.compile(r"\[?\d*([A-Za-z][a-z]?|\*)")
BONDS = {"=": 2.0, "#": 3.0, "-": 1.0, "/": 1.0, "\\": 1.0, ":": 1.5}
NEIGHBOUR_FACTOR = 90.0  # of the package


class Reaction(NamedTuple):
    """A reaction: its tokens, and of its atoms the token, the element and the bonds [atoms, atoms].

    Atoms of the product follow those of the precursors. `gold` is the precursor atom of each
    product atom, empty if unknown. Precursor atoms of one `symmetry` class are interchangeable.
    """

    tokens: tuple[str, ...]
    atoms: Array  # [atoms], index of the token
    elements: Array  # [atoms]
    bonds: Array  # [atoms, atoms], order of the bond
    num_precursors: int
    symmetry: Array  # [precursor atoms]
    gold: tuple[int, ...] = ()


def tokenize(smiles: str) -> list[str]:
    """Return the tokens of SMILES, as the vocabulary of rxnmapper has them."""
    tokens = TOKEN.findall(smiles)
    if "".join(tokens) != smiles:
        raise ValueError(
            f"{smiles!r} is not SMILES that rxnmapper reads: {''.join(tokens)!r} of it"
        )
    return tokens


def read_element(token: str) -> str:
    """Return the element of an atom.

    >>> [read_element(token) for token in ("c", "Cl", "[nH]", "[C@@H]", "[Na+]", "[13CH3]")]
    ['C', 'Cl', 'N', 'C', 'Na', 'C']
    """
    found = ELEMENT.match(token)
    assert found is not None
    return found[1].capitalize() if token.startswith("[") else token.capitalize()


def parse_reaction(smiles: str, gold: Sequence[int] = ()) -> Reaction:
    """Return the atoms and bonds of a reaction, precursors>>product."""
    tokens = tokenize(smiles)
    atoms = [number for number, token in enumerate(tokens) if IS_ATOM.match(token)]
    arrow = tokens.index(">>")
    bonds = np.zeros((len(atoms), len(atoms)))
    previous: int | None = None
    order = 0.0
    branches: list[int | None] = []
    rings: dict[str, tuple[int, float]] = {}

    def connect(first: int, second: int, given: float) -> None:
        is_aromatic = all(tokens[atoms[one]].strip("[")[0].islower() for one in (first, second))
        bonds[first, second] = bonds[second, first] = given or (1.5 if is_aromatic else 1.0)

    count = 0
    for token in tokens:
        if IS_ATOM.match(token):
            if previous is not None:
                connect(previous, count, order)
            previous = count
            order = 0.0
            count += 1
        elif token == "(":
            branches.append(previous)
        elif token == ")":
            previous = branches.pop()
        elif token in BONDS:
            order = BONDS[token]
        elif token[0].isdigit() or token[0] == "%":
            assert previous is not None
            if token in rings:
                other, opened = rings.pop(token)
                connect(other, previous, order or opened)
            else:
                rings[token] = previous, order
            order = 0.0
        else:  # a dot, a tilde or the arrow
            previous = None
    num_precursors = sum(place < arrow for place in atoms)
    elements = np.array([read_element(tokens[place]) for place in atoms])
    inside = slice(num_precursors)
    symmetry = refine_classes(elements[inside], bonds[inside, inside])
    return Reaction(
        tuple(tokens), np.array(atoms), elements, bonds, num_precursors, symmetry, tuple(gold)
    )


def refine_classes(elements: Array, bonds: Array) -> Array:
    """Return classes of atoms that have the same surroundings (Weisfeiler and Leman 1968)."""
    labels = np.unique(elements, return_inverse=True)[1]
    for _ in range(len(elements)):
        surroundings = [
            (labels[atom], *sorted(zip(bonds[atom][near], labels[near], strict=True)))
            for atom, near in enumerate(bonds > 0)
        ]
        names = {one: number for number, one in enumerate(sorted(set(surroundings)))}
        labels = np.array([names[one] for one in surroundings])
    return labels


# --- Mappings -------------------------------------------------------------------------------------


def product_to_precursor(weights: Array, reaction: Reaction) -> Array:
    """Return the weights between product atoms and precursor atoms, of both directions together.

    `weights` are those of one head over [CLS], the tokens and [SEP], [queries, keys].
    """
    places = reaction.atoms + 1
    precursors = places[: reaction.num_precursors]
    product = places[reaction.num_precursors :]
    return weights[np.ix_(product, precursors)] + weights[np.ix_(precursors, product)].T


def map_atoms(scores: Array, reaction: Reaction) -> tuple[Array, float]:
    """Return the precursor atom of each product atom (-1: none), and the confidence."""
    count = reaction.num_precursors
    same_element = reaction.elements[count:, None] == reaction.elements[None, :count]
    near_product = reaction.bonds[count:, count:] > 0
    near_precursor = reaction.bonds[:count, :count] > 0
    factors = same_element.astype(float)
    mapping = np.full(len(scores), -1)
    confidence = 1.0
    for _ in range(len(scores)):
        raised = scores * factors
        totals = raised.sum(1, keepdims=True)
        shares = np.divide(raised, totals, out=np.zeros_like(raised), where=totals > 0)
        atom, target = np.unravel_index(shares.argmax(), shares.shape)
        if np.isclose(shares[atom, target], 0.0):
            break
        confidence *= shares[atom, target]
        mapping[atom] = target
        factors[np.ix_(near_product[atom], near_precursor[target])] *= NEIGHBOUR_FACTOR
        factors[atom] = 0
        factors[:, target] = 0
    return mapping, float(confidence)


def count_equal(mapping: Array, other: Sequence[int] | Array, reaction: Reaction) -> int:
    """Return the number of product atoms that two mappings assign to interchangeable atoms."""
    classes = np.append(reaction.symmetry, -1)  # an atom that is not mapped is in no class
    other = np.asarray(other)
    return int(((classes[mapping] == classes[other]) & (mapping >= 0)).sum())


def read_reactions() -> list[Reaction]:
    """Return the reactions of the file."""
    lines = FILE.read_text().splitlines()
    reactions: list[Reaction] = []
    for line in lines[1:]:
        _, smiles, gold = line.split("\t")
        reactions.append(parse_reaction(smiles, [int(number) for number in gold.split()]))
    return reactions


# --- Reactions from building blocks ---------------------------------------------------------------

# Blocks end (left) or begin (right) with the atom that the reaction attaches.
ALKYL_LEFT = ("CC(C)C", "COCC", "C1CCCCC1", "CCOC(=O)CC", "FC(F)(F)CC", "c1ccccc1C", "CC(C)(C)OCC")
ARYL_LEFT = (
    *("c1cc(F)ccc1", "c1cc(OC)ccc1", "n1ccccc1", "c1cc(C#N)ccc1", "c1sccc1", "c1c(C)cccc1"),
    *("n1cc(C)ccc1", "c1cc(C(=O)OC)ccc1"),
)
ALKYL_RIGHT = (
    "CCC",
    "C(C)C",
    "Cc1ccccc1",
    "CCOC",
    "C1CCCC1",
    "CCN(C)C",
    "CC(=O)OC",
    "CCc1ccc(O)cc1",
)
ARYL_RIGHT = (
    *("c1ccccc1", "c1ccc(Cl)cc1", "c1ccc(C)nc1", "c1cccc(C(F)(F)F)c1", "c1ccc(OC)cc1"),
    "c1cnc(N)nc1",
)
LEFT = (*ALKYL_LEFT, *ARYL_LEFT)
RIGHT = (*ALKYL_RIGHT, *ARYL_RIGHT)
# Kind: blocks, precursors and product. A piece is a block, or SMILES; a name before a colon marks
# atoms that stay.
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], str]] = {
    "amide": (LEFT, RIGHT, ("L c:C(=O) O", "n:N R", "ClCCl"), "L c:C(=O) n:N R"),
    "ester": (LEFT, ALKYL_RIGHT, ("L c:C(=O) Cl", "o:O R", "CCN(CC)CC"), "L c:C(=O) o:O R"),
    "sulfonamide": (LEFT, RIGHT, ("L s:S(=O)(=O) Cl", "n:N R", "c1ccncc1"), "L s:S(=O)(=O) n:N R"),
    "hydrolysis": (LEFT, ("C",), ("L c:C(=O)O C", "[Na+]", "[OH-]"), "L c:C(=O)O"),
    "deprotection": (("",), RIGHT, ("CC(C)(C)OC(=O) n:N R", "O=C(O)C(F)(F)F"), "n:N R"),
    "Suzuki": (ARYL_LEFT, ARYL_RIGHT, ("L Br", "OB(O) R", "C1COCCO1"), "L - R"),
    "ether": (ALKYL_LEFT, ARYL_RIGHT, ("L Br", "o:O R", "CN(C)C=O"), "L o:O R"),
    "substitution": (ARYL_LEFT, ALKYL_RIGHT, ("L F", "n:N R", "CS(C)=O"), "L n:N R"),
    "amination": (LEFT, RIGHT, ("L c:C =O", "n:N R", "CO"), "L c:C n:N R"),
    "reduction": (ARYL_LEFT, ("",), ("L n:[N+] (=O)[O-]", "[Fe]", "CCO"), "L n:N"),
}
PER_KIND = 8


def make_molecule(template: str, blocks: dict[str, str]) -> tuple[str, list[Any]]:
    """Return canonical SMILES of a molecule, and the name of each atom that stays (else None)."""
    from rdkit import Chem

    smiles = ""
    names: list[Any] = []
    for piece in template.split():
        name, _, text = piece.rpartition(":")
        if piece in blocks:
            name, text = piece, blocks[piece]
        num_atoms = sum(bool(IS_ATOM.match(token)) for token in tokenize(text))
        names += [(name, number) if name else None for number in range(num_atoms)]
        smiles += text
    molecule = Chem.MolFromSmiles(smiles)
    canonical = Chem.MolToSmiles(molecule)
    properties = molecule.GetPropsAsDict(includePrivate=True, includeComputed=True)
    return canonical, [names[atom] for atom in properties["_smilesAtomOutputOrder"]]


def make_reaction(
    templates: Sequence[str], product: str, blocks: dict[str, str]
) -> tuple[str, str]:
    """Return the SMILES of a reaction, precursors sorted, and its mapping."""
    precursors = sorted(
        (make_molecule(template, blocks) for template in templates), key=lambda pair: pair[0]
    )
    names = [name for _, own in precursors for name in own]
    smiles, kept = make_molecule(product, blocks)
    gold = [names.index(name) for name in kept]
    left = ".".join(text for text, _ in precursors)
    return f"{left}>>{smiles}", " ".join(map(str, gold))


def write_reactions() -> None:
    """Write the file of reactions: some of each kind, from blocks drawn at random."""
    generator = np.random.default_rng(0)
    lines = ["kind\treaction\tprecursor atom of each product atom"]
    for kind, (lefts, rights, templates, product) in KINDS.items():
        pairs = [(left, right) for left in lefts for right in rights]
        for number in generator.permutation(len(pairs))[:PER_KIND]:
            blocks = dict(zip("LR", pairs[number], strict=True))
            lines.append("\t".join((kind, *make_reaction(templates, product, blocks))))
    FILE.write_text("\n".join(lines) + "\n")
    print(f"{FILE}: {len(lines) - 1} reactions")


if __name__ == "__main__":
    write_reactions()
