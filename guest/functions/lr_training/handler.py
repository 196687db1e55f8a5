"""FunctionBench's model_training: trains a logistic regression on reviews, with scikit-learn."""

from model import trained
from reviews import reviews


def handler(event, context):
    words, model = trained(reviews(event["seed"], event["reviews"]))
    texts, marks = zip(*reviews(event["seed"] + 1000, 500))
    return {
        "words": len(words.vocabulary_),
        "right_of_500": int((model.predict(words.transform(texts)) == marks).sum()),
        "intercept": round(float(model.intercept_[0]), 4),
        "love": round(float(model.coef_[0][words.vocabulary_["love"]]), 4),
    }
