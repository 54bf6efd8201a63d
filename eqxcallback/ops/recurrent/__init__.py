"""The gates of recurrent cells."""

from ._recurrent import gru_gates as gru_gates, lstm_gates as lstm_gates
