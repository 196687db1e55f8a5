"""Classifies reviews with TF-IDF and a logistic regression, as in FunctionBench."""

from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression


def trained(pairs):
    """A vectoriser and a model."""
    texts, marks = zip(*pairs)
    words = TfidfVectorizer(min_df=2)
    model = LogisticRegression(max_iter=200).fit(words.fit_transform(texts), marks)
    return words, model
