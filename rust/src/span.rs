//! Keys and values of consecutive tokens, one row each.

use crate::rows::{Dtype, Elements, RowStore, Strided};

#[derive(Debug, Clone)]
pub struct Span {
    /// [len, key_dim]
    pub keys: RowStore,
    /// [len, value_dim]
    pub values: RowStore,
}

impl Span {
    pub fn new(dtype: Dtype, key_dim: usize, value_dim: usize) -> Self {
        Self {
            keys: RowStore::new(dtype, key_dim),
            values: RowStore::new(dtype, value_dim),
        }
    }

    pub fn len(&self) -> usize {
        self.keys.len()
    }

    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Key and value of a token.
    pub fn row(&self, i: usize) -> [Elements<'_>; 2] {
        [self.keys.row(i), self.values.row(i)]
    }

    pub fn reserve(&mut self, more: usize) {
        self.keys.reserve(more);
        self.values.reserve(more);
    }

    /// Appends token `i` of others.
    pub fn push(&mut self, keys: Strided<'_>, values: Strided<'_>, i: usize) {
        self.keys.push(keys.row(i));
        self.values.push(values.row(i));
    }

    /// Appends all tokens of another.
    pub fn extend(&mut self, other: &Self) {
        self.reserve(other.len());
        for i in 0..other.len() {
            self.push(other.keys.strided(), other.values.strided(), i);
        }
    }

    /// Keeps the first `len` tokens.
    pub fn truncate(&mut self, len: usize) {
        self.keys.truncate(len);
        self.values.truncate(len);
    }

    /// Removes the first `count` tokens, and gives unused memory back.
    pub fn drop_front(&mut self, count: usize) {
        self.keys.drop_front(count);
        self.values.drop_front(count);
    }

    pub fn bytes(&self) -> usize {
        self.keys.bytes() + self.values.bytes()
    }
}
