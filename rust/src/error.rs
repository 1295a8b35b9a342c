//! Everything that can go wrong, in one enum. Messages say what was expected and what came.

use crate::rows::Dtype;

/// An error of the cache or the index. What was stored before is intact, unless it is `Poisoned`.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// An option is outside its range.
    #[error("{option} must be {expected}, got {got}")]
    Config {
        option: &'static str,
        expected: String,
        got: String,
    },
    /// An array has another shape than the call needs.
    #[error("{what} must have shape {expected}, got {got}")]
    Shape {
        what: &'static str,
        expected: String,
        got: String,
    },
    /// An array has another element type than what is stored.
    #[error("{what} must be {expected} like what is stored, got {got}")]
    Dtype {
        what: &'static str,
        expected: Dtype,
        got: Dtype,
    },
    /// NaN or infinity, which would spread through the softmax, or a number whose square would.
    #[error("{what} must be {}, got {value} at head {head}, token {token}", range(*value))]
    OutOfRange {
        what: &'static str,
        head: usize,
        token: usize,
        value: f32,
    },
    /// The same in a plain matrix.
    #[error("{what} must be {}, got {value} in row {row}", range(*value))]
    RowOutOfRange {
        what: &'static str,
        row: usize,
        value: f32,
    },
    /// Attention needs at least one stored token.
    #[error("nothing is stored yet: call prefill or append before {call}")]
    Empty { call: &'static str },
    /// A crop asks to keep more tokens than there are.
    #[error("crop keeps the first n tokens: n must be at most {stored}, got {asked}")]
    Crop { stored: usize, asked: usize },
    /// More query positions than the window still holds in order of position.
    #[error("{call} takes the last {most} positions at most, got {got}")]
    TooManyQueries {
        call: &'static str,
        most: usize,
        got: usize,
    },
    /// Another layer's choices are not for this layer's positions.
    #[error("like must be a layer with {expected} {what}, as this one after the call, got {got}")]
    Like {
        what: &'static str,
        expected: usize,
        got: usize,
    },
    /// What is wrong with one row of a batch.
    #[error("{error} (row {row} of the batch)")]
    InRow { row: usize, error: Box<Error> },
    /// A layer of a batch comes again.
    #[error("expected each layer of a batch once, got one twice")]
    Twice,
    /// Slots on a device exist once it is open.
    #[error("no device is open: call open_device before stage")]
    NoDevice,
    /// More positions at once than the slots of a device hold for sure.
    #[error("stage takes at most {most} positions, as many as device_tokens allows, got {got}")]
    TooManyPositions { most: usize, got: usize },
    /// A staging buffer that does not do.
    #[error("staging must be {expected}, got {got}")]
    Staging { expected: String, got: String },
    /// History that is not stored.
    #[error("history ends after {stored} tokens, got {first} to {end}")]
    History {
        stored: usize,
        first: usize,
        end: usize,
    },
    /// Token positions are 32-bit.
    #[error("a sequence holds at most {most} tokens, got {got}")]
    TooLong { most: usize, got: usize },
    /// `check()` found a broken invariant: a defect of the library, please report it.
    #[error("broken invariant: {0}")]
    Invariant(String),
    /// The caller gave up on a long call.
    #[error("interrupted")]
    Interrupted,
    /// A panic, now or earlier, left this object in an unknown state.
    #[error("internal error, please report it; this object cannot be used any more: {0}")]
    Poisoned(String),
}

pub type Result<T> = std::result::Result<T, Error>;

/// Largest element of a key or value: sums of squares over any number of tokens stay finite.
pub const LARGEST_ELEMENT: f32 = 1e15;

/// What a number that was refused should have been.
fn range(value: f32) -> &'static str {
    if value.is_finite() {
        "at most 1e15 in size"
    } else {
        "finite"
    }
}
