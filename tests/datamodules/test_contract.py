import lightning.pytorch as pl
import pytest
from torch.utils.data import DataLoader

from datamodules import ImageFolderDataModule, MNISTDataModule, TranslationDataModule, UserError
from datamodules.contract import Advanced, Changeable, DataContract, Transient, data_contract, marked_parameters

MEMBERS = [name for name in vars(DataContract) if not name.startswith("_")]


class Stock(pl.LightningDataModule):
    """A data module as Lightning's documentation writes one, which has nothing of the contract."""

    def train_dataloader(self) -> DataLoader[int]:
        return DataLoader(range(24), batch_size=8)

    val_dataloader = test_dataloader = train_dataloader


class Telling(Stock):
    """It has attributes and hyper-parameters of the contract's names, which may mean anything."""

    class_names = ("ant", "bee", "wasp")
    image_size = 8

    def __init__(self, num_classes: int = 3, seed: int = 7) -> None:
        super().__init__()
        self.save_hyperparameters()


class Declared(Telling, DataContract):
    """It says that they are the contract's."""


def test_a_stock_data_module_gets_the_defaults():
    stock = data_contract(Stock())
    assert stock.title == "Stock"
    assert (stock.seed, stock.sizes, stock.num_classes, stock.class_names) == (0, {}, None, ())
    assert (stock.image_size, stock.natural_images, stock.validates, stock.prediction_names) == (None, True, True, ())
    assert stock.resolve() == {}
    assert stock.tokens_parameter is None
    assert data_contract(None).num_classes is None
    assert not hasattr(stock, "train_dataloader")


def test_attributes_count_where_the_contract_is_inherited():
    telling = data_contract(Telling())
    assert (telling.num_classes, telling.class_names, telling.seed, telling.image_size) == (None, (), 0, None)
    declared = data_contract(Declared())
    assert (declared.class_names, declared.image_size, declared.title) == (("ant", "bee", "wasp"), 8, "Declared")


def test_data_without_numbers_has_no_numbered_batches():
    with pytest.raises(UserError, match="Stock does not number its samples; pass an ImageFolderDataModule"):
        data_contract(Stock()).numbered_batches("train")


@pytest.mark.parametrize("data_class", [MNISTDataModule, ImageFolderDataModule, TranslationDataModule])
def test_every_member_of_ours_can_be_read_before_any_data(data_class: type[pl.LightningDataModule]):
    options = {} if data_class is TranslationDataModule else {"dataset": "digits"}
    contract = data_contract(data_class(**options, seed=5))
    assert isinstance(contract, data_class)
    for name in set(MEMBERS) - {"resolve", "prediction_names"}:
        getattr(contract, name)
    assert contract.seed == 5
    assert "Data" not in contract.title
    for mark in (Changeable, Transient, Advanced):
        assert marked_parameters(data_class, mark) <= set(contract.hparams)
    assert (contract.tokens_parameter or "seed") in contract.hparams
