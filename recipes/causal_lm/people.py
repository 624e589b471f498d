"""Sentences about people who do not exist. The training rows and the targets say the same of them, in other words."""

import random

from datasets import Dataset, DatasetDict

NAMES = (
    "Abel Ada Alma Anton Bela Bruno Carla Cosmo Dora Edgar Elsa Emil Fanny Felix Flora Georg Greta Hugo Ida Igor Ines "
    "Jakob Jonas Julia Karl Klara Leo Lena Lotte Marta Max Mila Nora Oskar Otto Paula Rosa Simon Theo Viola"
)
FACTS = {
    "town": "Arles Bergen Cork Delft Essen Faro Ghent Hull Ivrea Jena Kiel Lille",
    "animal": "badger camel donkey ferret goose heron lizard mule pony parrot rabbit turtle",
    "dish": "barley cabbage dumplings lentils noodles omelette pancakes porridge risotto soup stew trout",
    "instrument": "banjo bassoon cello clarinet drum flute guitar harp lute oboe trumpet violin",
}
FORMS = (
    "{name} lives in {town} with a {animal}. In the evening {name} cooks {dish} and plays the {instrument}.",
    "In {town} everybody knows {name}, who plays the {instrument}, keeps a {animal} and cooks {dish}.",
    "{name} plays the {instrument} for a {animal}, and later they eat {dish} at home in {town}.",
    "Who cooks {dish} in {town} and has a {animal}? It is {name}, who also plays the {instrument}.",
    "The {animal} of {name} likes {dish}, the {instrument} and the town of {town}.",
)


def people() -> DatasetDict:
    """Write about each of 40 people in four forms for the training, and in another one for the test.

    Columns `text` and `name`.
    """
    numbers = random.Random(0)
    rows: dict[str, list[dict[str, str]]] = {"train": [], "test": []}
    for place, name in enumerate(NAMES.split()):
        facts = {fact: numbers.choice(values.split()) for fact, values in FACTS.items()}
        for number, form in enumerate(FORMS):
            held_out = number == place % len(FORMS)
            rows["test" if held_out else "train"].append({"text": form.format(name=name, **facts), "name": name})
    return DatasetDict({split: Dataset.from_list(of) for split, of in rows.items()}).shuffle(seed=0)
