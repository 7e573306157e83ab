import pytest
import torch

from callbacks.lib.targets import count_targets, observe_steps, warn_of_ignored_targets
from tests.support.tables import Tiny, sentence_network, sentences


@pytest.mark.parametrize(("count", "expected"), [(None, 1), (3, 0)])
def test_labels_of_minus_100_without_a_count_are_warned_of(count, expected, caplog):
    output = torch.zeros(()) if count is None else {"loss": torch.zeros(()), "count": count}
    warn_of_ignored_targets(output, sentences(4))
    assert caplog.text.count("labels of -100") == expected
    assert count_targets(output, sentences(4)) == (count or 4)


@pytest.mark.parametrize("earlier", [0, 1])
@pytest.mark.parametrize("own", [False, True])
def test_steps_are_observed_by_several_until_each_is_released_in_any_order(earlier: int, own: bool):
    module, told = Tiny(sentence_network(), torch.optim.SGD, lr=0.1), []
    if own:
        module.training_step = lambda *step: step[1]
    before = module.training_step
    releases = [
        observe_steps(module, lambda *_: told.append("first"), lambda: told.append("before")),
        observe_steps(module, lambda *_: told.append("second")),
    ]
    module.training_step(sentences(4), 0)
    assert told == ["before", "first", "second"]
    releases[earlier]()
    module.training_step(sentences(4), 0)
    assert told[3:] == (["before", "first"] if earlier else ["second"])
    releases[1 - earlier]()
    module.training_step(sentences(4), 0)
    assert len(told) == (5 if earlier else 4)
    assert module.training_step == before
    assert ("training_step" in vars(module)) == own
