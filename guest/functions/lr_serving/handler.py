"""FunctionBench's model serving by logistic regression: classifies a review, with scikit-learn.

The model is trained when the function is loaded; FunctionBench loads one from a file.
"""

from model import trained
from reviews import reviews

WORDS, MODEL = trained(reviews(seed=7, count=2000))


def handler(event, context):
    texts = [text for text, _ in reviews(event["seed"], event["reviews"])]
    likely = MODEL.predict_proba(WORDS.transform(texts))[:, 1]
    return {"good": int((likely > 0.5).sum()), "first": round(float(likely[0]), 4), "last": round(float(likely[-1]), 4)}
