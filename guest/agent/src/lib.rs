//! The guest agent and its protocol.
