"""From text to text: templates, the pipeline that `cdlm.load` returns, and how a model generates best."""
