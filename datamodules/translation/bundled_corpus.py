"""An artificial French-English corpus from a small grammar, for runs without a file: ``bundled_pairs()``.

It is not a sample of either language. Its sentences agree in gender, number and person, elide (j'ai, l'homme, d'orange)
and contract (au, du), so that a network has something to learn, and nearly every word of it occurs in many sentences.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch

from datamodules.loading.randomness import random_bits

__all__ = ["BUNDLED_TITLE", "bundled_pairs"]

BUNDLED_TITLE = "bundled artificial French-English sentences"

_DRAWS = 600


class _Noun(NamedTuple):
    """A noun with its gender, m or f."""

    english: str
    english_plural: str
    french: str
    french_plural: str
    gender: str


class _Phrase(NamedTuple):
    """A subject or an object; `person` is 0 to 5 for je, tu, il, nous, vous, ils."""

    french: str
    english: str
    person: int
    gender: str


def _nouns(text: str) -> list[_Noun]:
    return [_Noun(*line.split("/")) for line in text.split()]


_PEOPLE = _nouns("""
    man/men/homme/hommes/m woman/women/femme/femmes/f boy/boys/garçon/garçons/m girl/girls/fille/filles/f
    child/children/enfant/enfants/m neighbour/neighbours/voisin/voisins/m queen/queens/reine/reines/f
    nurse/nurses/infirmière/infirmières/f
""")
_ANIMALS = _nouns(
    "dog/dogs/chien/chiens/m cat/cats/chat/chats/m bird/birds/oiseau/oiseaux/m horse/horses/cheval/chevaux/m "
    "cow/cows/vache/vaches/f mouse/mice/souris/souris/f"
)
_THINGS = _nouns(
    "apple/apples/pomme/pommes/f book/books/livre/livres/m letter/letters/lettre/lettres/f key/keys/clé/clés/f "
    "car/cars/voiture/voitures/f hat/hats/chapeau/chapeaux/m orange/oranges/orange/oranges/f "
    "knife/knives/couteau/couteaux/m"
)
_PLACES = _nouns(
    "school/schools/école/écoles/f garden/gardens/jardin/jardins/m market/markets/marché/marchés/m "
    "station/stations/gare/gares/f hospital/hospitals/hôpital/hôpitaux/m church/churches/église/églises/f "
    "park/parks/parc/parcs/m library/libraries/bibliothèque/bibliothèques/f"
)

# Masculine, feminine, both plurals; the second of these stands before a vowel. All of them precede their noun.
_ADJECTIVES = {
    "small": ("petit", "petit", "petite", "petits", "petites"),
    "big": ("grand", "grand", "grande", "grands", "grandes"),
    "old": ("vieux", "vieil", "vieille", "vieux", "vieilles"),
    "beautiful": ("beau", "bel", "belle", "beaux", "belles"),
    "young": ("jeune", "jeune", "jeune", "jeunes", "jeunes"),
}
_STATES = {
    "tired": ("fatigué", "fatiguée", "fatigués", "fatiguées"),
    "happy": ("heureux", "heureuse", "heureux", "heureuses"),
    "sad": ("triste", "triste", "tristes", "tristes"),
    "ready": ("prêt", "prête", "prêts", "prêtes"),
    "alone": ("seul", "seule", "seuls", "seules"),
    "strong": ("fort", "forte", "forts", "fortes"),
    "jealous": ("jaloux", "jalouse", "jaloux", "jalouses"),
    "serious": ("sérieux", "sérieuse", "sérieux", "sérieuses"),
}
# English: base, third person, past. French: six persons, past participle, infinitive.
_VERBS = [
    ("see sees saw", "vois vois voit voyons voyez voient vu voir"),
    ("forget forgets forgot", "oublie oublies oublie oublions oubliez oublient oublié oublier"),
    ("buy buys bought", "achète achètes achète achetons achetez achètent acheté acheter"),
    ("take takes took", "prends prends prend prenons prenez prennent pris prendre"),
    ("find finds found", "trouve trouves trouve trouvons trouvez trouvent trouvé trouver"),
    ("draw draws drew", "dessine dessines dessine dessinons dessinez dessinent dessiné dessiner"),
]
_MOTIONS = [("arrived", "arrivé"), ("left", "parti"), ("fell", "tombé"), ("came", "venu"), ("stayed", "resté")]
_MODALS = [
    ("want to/wants to", "veux veux veut voulons voulez veulent"),
    ("can/can", "peux peux peut pouvons pouvez peuvent"),
    ("must/must", "dois dois doit devons devez doivent"),
]
_TO_BE = ["suis", "es", "est", "sommes", "êtes", "sont"]
_WAS = ["étais", "étais", "était", "étions", "étiez", "étaient"]
_TO_HAVE = ["ai", "as", "a", "avons", "avez", "ont"]
_TO_GO = ["vais", "vas", "va", "allons", "allez", "vont"]
_TO_COME = ["viens", "viens", "vient", "venons", "venez", "viennent"]
_NUMBERS = [("two", "deux"), ("three", "trois"), ("four", "quatre"), ("ten", "dix")]
_POSITIONS = [("in", "dans"), ("in front of", "devant"), ("behind", "derrière")]
_TIMES = [("yesterday", "hier"), ("this morning", "ce matin"), ("last night", "hier soir")]


def _vowel(word: str) -> bool:
    """Whether a word begins with a vowel or a mute h, as all h of this grammar are."""
    return word[0].lower() in "aeiouéèêàâôh"


def _elide(short: str, word: str) -> str:
    """je aime -> j'aime; la école -> l'école."""
    return f"{short[:-1]}'{word}" if _vowel(word) else f"{short} {word}"


def _the(noun: _Noun, plural: bool = False) -> tuple[str, str]:
    if plural:
        return f"les {noun.french_plural}", f"the {noun.english_plural}"
    return _elide("le" if noun.gender == "m" else "la", noun.french), f"the {noun.english}"


def _a(noun: _Noun) -> tuple[str, str]:
    article = "an" if noun.english[0] in "aeiou" else "a"
    return f"{'un' if noun.gender == 'm' else 'une'} {noun.french}", f"{article} {noun.english}"


def _described(noun: _Noun, english: str, plural: bool) -> tuple[str, str]:
    """With an adjective: le vieil homme, les belles écoles."""
    masculine, before_vowel, feminine, masculines, feminines = _ADJECTIVES[english]
    if plural:
        adjective = masculines if noun.gender == "m" else feminines
        return f"les {adjective} {noun.french_plural}", f"the {english} {noun.english_plural}"
    if noun.gender == "f":
        return f"la {feminine} {noun.french}", f"the {english} {noun.english}"
    adjective = before_vowel if _vowel(noun.french) else masculine
    return f"le {adjective} {noun.french}", f"the {english} {noun.english}"


def _to_the(noun: _Noun) -> str:
    """à + le is au."""
    french = _the(noun)[0]
    return f"au {noun.french}" if french.startswith("le ") else f"à {french}"


def _of_the(noun: _Noun) -> str:
    """de + le is du."""
    french = _the(noun)[0]
    return f"du {noun.french}" if french.startswith("le ") else f"de {french}"


_PRONOUNS = [
    *(_Phrase("je", "I", 0, g) for g in "mf"),
    *(_Phrase("tu", "you", 1, g) for g in "mf"),
    _Phrase("il", "he", 2, "m"),
    _Phrase("elle", "she", 2, "f"),
    *(_Phrase("nous", "we", 3, g) for g in "mf"),
    *(_Phrase("vous", "you", 4, g) for g in "mf"),
    _Phrase("ils", "they", 5, "m"),
    _Phrase("elles", "they", 5, "f"),
]
_NAMES = [_Phrase("Paul", "Paul", 2, "m"), _Phrase("Marie", "Marie", 2, "f"), _Phrase("Anne", "Anne", 2, "f")]


def _subjects() -> list[_Phrase]:
    """Pronouns, names and people, these also with an adjective and in the plural; repeated by how often they come."""
    people = [_Phrase(*_the(noun, plural), 5 if plural else 2, noun.gender) for noun, plural in _with_plural(_PEOPLE)]
    described = [
        _Phrase(*_described(noun, english, plural), 5 if plural else 2, noun.gender)
        for noun, plural in _with_plural(_PEOPLE)
        for english in _ADJECTIVES
    ]
    return [*_PRONOUNS * 6, *_NAMES * 4, *people * 2, *described]


def _with_plural(nouns: list[_Noun]) -> list[tuple[_Noun, bool]]:
    return list(product(nouns, (False, True)))


def _clause(subject: _Phrase, verb: str) -> str:
    """Subject and verb: je + ai is j'ai."""
    return _elide("je", verb) if subject.french == "je" else f"{subject.french} {verb}"


def _negated(subject: _Phrase, verb: str) -> str:
    return f"{subject.french} {_elide('ne', verb)} pas"


def _agree(forms: tuple[str, ...], subject: _Phrase) -> str:
    """One of masculine, feminine, masculine plural, feminine plural."""
    return forms[(subject.gender == "f") + 2 * (subject.person >= 3)]


def _is(subject: _Phrase) -> str:
    return ("am", "are", "is", "are", "are", "are")[subject.person]


def _does(subject: _Phrase, english: str) -> str:
    """The English verb in the present: go, goes."""
    forms = english.split("/")
    return forms[1] if subject.person == 2 else forms[0]


def _objects() -> list[tuple[str, str]]:
    nouns = [*_THINGS, *_ANIMALS]
    return [*map(_a, nouns), *(_the(*noun) for noun in _with_plural(nouns))]


_Pair = tuple[str, str]
_SUBJECTS, _OBJECTS, _NOUNS = _subjects(), _objects(), [*_THINGS, *_ANIMALS]
_VERB_FORMS = [(english.split(), french.split()) for english, french in _VERBS]
_Verb = tuple[list[str], list[str]]


def _state(subject: _Phrase, state: tuple[str, tuple[str, ...]], kind: int) -> _Pair:
    english, french, name = state[0], _agree(state[1], subject), subject.english
    if kind == 0:
        was = "was" if subject.person in (0, 2) else "were"
        return f"{_clause(subject, _WAS[subject.person])} {french}.", f"{name} {was} {english}."
    if kind == 1:
        return f"{_negated(subject, _TO_BE[subject.person])} {french}.", f"{name} {_is(subject)} not {english}."
    return f"{_clause(subject, _TO_BE[subject.person])} {french}.", f"{name} {_is(subject)} {english}."


def _action(subject: _Phrase, verb: _Verb, thing: _Pair) -> _Pair:
    finite, does = verb[1][subject.person], verb[0][subject.person == 2]
    return f"{_clause(subject, finite)} {thing[0]}.", f"{subject.english} {does} {thing[1]}."


def _question(subject: _Phrase, verb: _Verb, thing: _Pair) -> _Pair:
    clause = _elide("est-ce que", _clause(subject, verb[1][subject.person]))
    do = "does" if subject.person == 2 else "do"
    return f"{clause} {thing[0]} ?", f"{do} {subject.english} {verb[0][0]} {thing[1]}?"


def _negation(subject: _Phrase, verb: _Verb, noun: _Noun, definite: bool) -> _Pair:
    clause = _negated(subject, verb[1][subject.person])
    english = f"{subject.english} {'does' if subject.person == 2 else 'do'} not {verb[0][0]}"
    if definite:
        return f"{clause} {_the(noun, True)[0]}.", f"{english} {_the(noun, True)[1]}."
    # After a negation un and une are de.
    return f"{clause} {_elide('de', noun.french)}.", f"{english} {_a(noun)[1]}."


def _past(subject: _Phrase, verb: _Verb, thing: _Pair) -> _Pair:
    clause = f"{_clause(subject, _TO_HAVE[subject.person])} {verb[1][6]}"
    return f"{clause} {thing[0]}.", f"{subject.english} {verb[0][2]} {thing[1]}."


def _motion(subject: _Phrase, motion: _Pair, time: _Pair) -> _Pair:
    english, french = motion
    participle = _agree((french, f"{french}e", f"{french}s", f"{french}es"), subject)
    clause = _clause(subject, _TO_BE[subject.person])
    return f"{clause} {participle} {time[1]}.", f"{subject.english} {english} {time[0]}."


def _wish(subject: _Phrase, modal: _Pair, verb: _Verb, thing: _Pair) -> _Pair:
    clause = f"{_clause(subject, modal[1].split()[subject.person])} {verb[1][7]}"
    return f"{clause} {thing[0]}.", f"{subject.english} {_does(subject, modal[0])} {verb[0][0]} {thing[1]}."


def _future(subject: _Phrase, verb: _Verb, thing: _Pair) -> _Pair:
    clause = f"{_clause(subject, _TO_GO[subject.person])} {verb[1][7]}"
    return f"{clause} {thing[0]}.", f"{subject.english} {_is(subject)} going to {verb[0][0]} {thing[1]}."


def _journey(subject: _Phrase, place: _Noun, away: bool) -> _Pair:
    if away:
        clause, does = _clause(subject, _TO_COME[subject.person]), _does(subject, "come/comes")
        return f"{clause} {_of_the(place)}.", f"{subject.english} {does} from the {place.english}."
    clause, does = _clause(subject, _TO_GO[subject.person]), _does(subject, "go/goes")
    return f"{clause} {_to_the(place)}.", f"{subject.english} {does} to the {place.english}."


def _position(noun: _Noun, position: _Pair, place: _Noun, count: int) -> _Pair:
    (english, french), (where, there) = position, _the(place)
    if count < 2:
        what, name = _the(noun, plural=count == 1)
        verb, be = (("est", "is"), ("sont", "are"))[count]
        return f"{what} {verb} {french} {where}.", f"{name} {be} {english} {there}."
    if count == 2:
        what, name = _a(noun)
        return f"il y a {what} {french} {where}.", f"there is {name} {english} {there}."
    number, nombre = _NUMBERS[count - 3]
    return (
        f"il y a {nombre} {noun.french_plural} {french} {where}.",
        f"there are {number} {noun.english_plural} {english} {there}.",
    )


_TEMPLATES: tuple[tuple[Callable[..., _Pair], Sequence[Sequence[Any]]], ...] = (
    (_state, (_SUBJECTS, list(_STATES.items()), range(4))),
    (_action, (_SUBJECTS, _VERB_FORMS, _OBJECTS)),
    (_question, (_SUBJECTS, _VERB_FORMS, _OBJECTS)),
    (_negation, (_SUBJECTS, _VERB_FORMS, _NOUNS, (True, False))),
    (_past, (_SUBJECTS, _VERB_FORMS, _OBJECTS)),
    (_motion, (_SUBJECTS, _MOTIONS, _TIMES)),
    (_wish, (_SUBJECTS, _MODALS, _VERB_FORMS, _OBJECTS)),
    (_future, (_SUBJECTS, _VERB_FORMS, _OBJECTS)),
    (_journey, (_SUBJECTS, _PLACES, (True, False))),
    (_position, ([*_PEOPLE, *_ANIMALS], _POSITIONS, _PLACES, range(3 + len(_NUMBERS)))),
)
"""Each template with what its parameters may be."""


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


@lru_cache(maxsize=1)
def bundled_pairs() -> tuple[tuple[str, str], ...]:
    """French and English sentences, about 4,800 pairs, always the same.

    Example:
        >>> len(bundled_pairs()) > 4500
        True
    """
    pairs: dict[_Pair, None] = {}
    for template, choices in _TEMPLATES:
        bits = random_bits(0, template.__name__, 0, torch.arange(_DRAWS), draws=len(choices))
        for row in bits.tolist():
            french, english = template(*(values[bit % len(values)] for values, bit in zip(choices, row)))
            pairs[_sentence(french), _sentence(english)] = None
    return tuple(pairs)
