"""Layout of wide text: Chinese characters take two columns of a terminal."""
