import lightning.pytorch as pl
import pytest
from torch.utils.data import DataLoader

from datamodules import ImageFolderDataModule, MNISTDataModule, TranslationDataModule
from datamodules.contract import DataContract, Free, OneCall, Rare, data_contract, marked_parameters

MEMBERS = [name for name in vars(DataContract) if not name.startswith("_")]


class Stock(pl.LightningDataModule):
    """A data module as Lightning's documentation writes one, which has nothing of the contract."""

    def train_dataloader(self) -> DataLoader[int]:
        return DataLoader(range(24), batch_size=8)

    val_dataloader = test_dataloader = train_dataloader


class Telling(Stock):
    """Its number of classes is a hyper-parameter, and their names are an attribute; other names mean other things."""

    class_names = ("ant", "bee", "wasp")
    image_size = (8, 8)
    sizes = (0.8, 0.2)

    def __init__(self, num_classes: int = 3, seed: int | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_a_stock_data_module_gets_the_defaults():
    stock = data_contract(Stock())
    assert stock.title == "Stock"
    assert (stock.seed, stock.sizes, stock.num_classes, stock.class_names) == (0, {}, None, ())
    assert (stock.image_size, stock.photographs, stock.validates, stock.prediction_names) == (None, True, True, ())
    assert stock.resolve() == {}
    assert stock.tokens_parameter is None
    assert data_contract(None).num_classes is None
    with pytest.raises(AttributeError, match="no part of the data contract"):
        _ = stock.train_dataloader


def test_attributes_and_hyper_parameters_count_where_they_mean_what_the_contract_does():
    telling = data_contract(Telling())
    assert (telling.num_classes, telling.class_names, telling.seed) == (3, ("ant", "bee", "wasp"), 0)
    assert (telling.image_size, telling.sizes) == (None, {})
    assert data_contract(Telling(seed=7)).seed == 7


@pytest.mark.parametrize("data_class", [MNISTDataModule, ImageFolderDataModule, TranslationDataModule])
def test_every_member_of_ours_can_be_read_before_any_data(data_class: type[pl.LightningDataModule]):
    options = {} if data_class is TranslationDataModule else {"dataset": "digits"}
    contract = data_contract(data_class(**options, seed=5))
    assert isinstance(contract, data_class)
    for name in set(MEMBERS) - {"resolve", "prediction_names"}:
        getattr(contract, name)
    assert contract.seed == 5
    assert "Data" not in contract.title
    for mark in (Free, OneCall, Rare):
        assert marked_parameters(data_class, mark) <= set(contract.hparams)
    assert (contract.tokens_parameter or "seed") in contract.hparams
