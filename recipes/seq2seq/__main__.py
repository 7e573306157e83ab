from recipes.runner.start import quick_imports

with quick_imports():
    from datamodules import TranslationDataModule
    from recipes import run

    from .recipe import Seq2SeqTranslator

run(Seq2SeqTranslator, TranslationDataModule)
