"""Reviews of food with a rating, instead of the Amazon data set that FunctionBench downloads.
Deterministic per seed."""

COMMON = ["the", "this", "coffee", "tea", "dog", "chocolate", "box", "ordered", "it", "a", "of", "flavor", "taste", "bag", "my", "was", "and"]
GOOD = ["great", "love", "delicious", "best", "perfect", "fresh", "favorite", "excellent", "smooth", "recommend"]
BAD = ["bad", "stale", "awful", "worst", "disappointed", "waste", "bland", "broken", "bitter", "refund"]


def reviews(seed, count):
    """`count` pairs of a text and whether its rating is good."""
    state = seed
    made = []
    for _ in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        good = state >> 63
        words = []
        for _ in range(12 + (state >> 40) % 20):
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            draw = (state >> 33) % 100
            # One word in five indicates the rating, and one in eight of these is wrong.
            if draw < 20:
                told = good if draw % 8 else 1 - good
                words.append((GOOD if told else BAD)[(state >> 50) % 10])
            elif draw < 60:
                words.append("word%d" % ((state >> 44) % 2000))
            else:
                words.append(COMMON[(state >> 45) % len(COMMON)])
        made.append((" ".join(words), good))
    return made
