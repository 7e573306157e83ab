import sys

try:
    from datamodules import TranslationDataModule
    from recipes import Seq2SeqTranslator, run

    run(Seq2SeqTranslator, TranslationDataModule)
except KeyboardInterrupt:  # The imports take seconds, too.
    sys.exit(130)
