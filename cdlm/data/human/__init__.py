"""Human text that comes with the package: what the samples of a model are compared with.

About half of each of the 132 documents that were held out when the bundled models were trained, cut at paragraphs: 106
articles of English Wikipedia (2015) and 27 chapters of two novels in the public domain. No span of 13 words that is
longer than a name or a quotation is in the training text (`python -m studies.human_text` made the file, and counts).
"""

from pathlib import Path

FILE = Path(__file__).parent / "human.txt.xz"
