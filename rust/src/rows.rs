//! Rows of numbers in f32, f16 or bf16: borrowed ([`Rows`], [`Strided`]) and owned ([`RowStore`]).
//!
//! Element types are decided at run time, once per block of rows, so that nothing above this file
//! is generic over them.

use crate::memory::{Number, Numbers};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Element type of stored rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    F32,
    F16,
    Bf16,
}

impl Dtype {
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    pub fn from_name(name: &str) -> Option<Self> {
        [Self::F32, Self::F16, Self::Bf16]
            .into_iter()
            .find(|dtype| dtype.name() == name)
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A stored element. Conversion to f32 is exact for every finite value and vectorises.
pub trait Element: Copy + Send + Sync + 'static {
    fn to_f32(self) -> f32;
    /// Nearest representable value; finite values beyond the range become the largest ones.
    fn from_f32(value: f32) -> Self;
    /// [`Element::from_f32`] of a row as long as `out`.
    #[inline(always)]
    fn round(row: &[f32], out: &mut [Self]) {
        (out.iter_mut().zip(row)).for_each(|(o, &value)| *o = Self::from_f32(value));
    }
}

impl Element for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
}

impl Element for f16 {
    /// Shifts exponent and mantissa into place and rescales by 2^112: right for zero, subnormal
    /// and normal numbers, without a branch. NaN and infinity never get into a store.
    #[inline(always)]
    fn to_f32(self) -> f32 {
        let bits = u32::from(self.to_bits());
        let magnitude = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits(0x7780_0000);
        f32::from_bits(magnitude.to_bits() | ((bits & 0x8000) << 16))
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        f16::from_f32(value.clamp(f16::MIN.to_f32_const(), f16::MAX.to_f32_const()))
    }
    /// Many at a time: the CPU is asked once per block, not once per element, what it can.
    fn round(row: &[f32], out: &mut [Self]) {
        let (least, most) = (f16::MIN.to_f32_const(), f16::MAX.to_f32_const());
        let mut block = [0.0f32; 64];
        for (row, out) in row.chunks(block.len()).zip(out.chunks_mut(block.len())) {
            let block = &mut block[..row.len()];
            (block.iter_mut().zip(row)).for_each(|(b, x)| *b = x.clamp(least, most));
            out.convert_from_f32_slice(block);
        }
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        bf16::from_f32(value.clamp(bf16::MIN.to_f32_const(), bf16::MAX.to_f32_const()))
    }
}

/// The elements of a block of rows.
#[derive(Debug, Clone, Copy)]
pub enum Elements<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    Bf16(&'a [bf16]),
}

/// The row of a store without columns, whatever its type.
pub const NO_ELEMENTS: Elements<'static> = Elements::F32(&[]);

/// Runs an expression with `$x` bound to the typed slice (or vector) inside.
macro_rules! typed {
    ($kind:ident, $value:expr, $x:ident => $body:expr) => {
        match $value {
            $kind::F32($x) => $body,
            $kind::F16($x) => $body,
            $kind::Bf16($x) => $body,
        }
    };
}
pub(crate) use typed;

impl<'a> Elements<'a> {
    pub fn slice(self, range: std::ops::Range<usize>) -> Self {
        match self {
            Self::F32(x) => Self::F32(&x[range]),
            Self::F16(x) => Self::F16(&x[range]),
            Self::Bf16(x) => Self::Bf16(&x[range]),
        }
    }

    /// The memory of these elements.
    pub fn as_bytes(self) -> &'a [u8] {
        fn bytes<T>(x: &[T]) -> &[u8] {
            // SAFETY: f32, f16 and bf16 have no padding, a byte has no alignment and every value of
            // it is valid; the slice covers the same memory for as long.
            unsafe { std::slice::from_raw_parts(x.as_ptr().cast(), size_of_val(x)) }
        }
        typed!(Elements, self, x => bytes(x))
    }
}

/// Elements of a caller's array, to be written.
#[derive(Debug)]
pub enum ElementsMut<'a> {
    F32(&'a mut [f32]),
    F16(&'a mut [f16]),
    Bf16(&'a mut [bf16]),
}

impl<'a> ElementsMut<'a> {
    pub fn len(&self) -> usize {
        typed!(ElementsMut, self, x => x.len())
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn dtype(&self) -> Dtype {
        match self {
            Self::F32(_) => Dtype::F32,
            Self::F16(_) => Dtype::F16,
            Self::Bf16(_) => Dtype::Bf16,
        }
    }

    /// Parts of `size` elements, one after the other.
    pub fn chunks(self, size: usize) -> Vec<Self> {
        match self {
            Self::F32(x) => x.chunks_mut(size).map(Self::F32).collect(),
            Self::F16(x) => x.chunks_mut(size).map(Self::F16).collect(),
            Self::Bf16(x) => x.chunks_mut(size).map(Self::Bf16).collect(),
        }
    }

    /// Writes `row`, which is of the same type, from `at` on.
    pub fn copy(&mut self, at: usize, row: Elements<'_>) {
        match (self, row) {
            (Self::F32(x), Elements::F32(row)) => x[at..][..row.len()].copy_from_slice(row),
            (Self::F16(x), Elements::F16(row)) => x[at..][..row.len()].copy_from_slice(row),
            (Self::Bf16(x), Elements::Bf16(row)) => x[at..][..row.len()].copy_from_slice(row),
            (_, Elements::F32([])) => {}
            _ => panic!("a row of another dtype than where it goes"),
        }
    }

    /// Writes `row`, rounded, from `at` on.
    pub fn write(&mut self, at: usize, row: &[f32]) {
        typed!(ElementsMut, self, x => Element::round(row, &mut x[at..at + row.len()]));
    }
}

/// Contiguous rows of `dim` elements each.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    pub dim: usize,
    pub len: usize,
    pub elements: Elements<'a>,
}

impl<'a> Rows<'a> {
    pub fn slice(self, range: std::ops::Range<usize>) -> Self {
        Self {
            dim: self.dim,
            len: range.len(),
            elements: self
                .elements
                .slice(range.start * self.dim..range.end * self.dim),
        }
    }

    pub fn row(self, i: usize) -> Elements<'a> {
        self.elements.slice(i * self.dim..(i + 1) * self.dim)
    }
}

/// Copies one row to f32.
pub fn to_f32(row: Elements<'_>, out: &mut [f32]) {
    typed!(Elements, row, x => out.iter_mut().zip(x).for_each(|(o, &v)| *o = Element::to_f32(v)));
}

/// Sum of squares, in 16 sums that run side by side.
pub fn squares(row: &[f32]) -> f32 {
    let mut sums = [0.0f32; 16];
    let blocks = row.chunks_exact(16);
    let rest: f32 = blocks.remainder().iter().map(|x| x * x).sum();
    blocks.for_each(|block| sums.iter_mut().zip(block).for_each(|(s, x)| *s += x * x));
    sums.iter().sum::<f32>() + rest
}

/// Squared distance of two points, summed as [`squares`] does.
pub fn squared_distance(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0f32; 16];
    let (left, right) = (a.chunks_exact(16), b.chunks_exact(16));
    let rest = left.remainder().iter().zip(right.remainder());
    let rest: f32 = rest.map(|(x, y)| (x - y) * (x - y)).sum();
    for (x, y) in left.zip(right) {
        let terms = x.iter().zip(y).map(|(x, y)| (x - y) * (x - y));
        sums.iter_mut().zip(terms).for_each(|(s, t)| *s += t);
    }
    sums.iter().sum::<f32>() + rest
}

/// Euclidean norm. Summed in f64, where the square of no f32 overflows.
pub fn norm(row: &[f32]) -> f32 {
    let squares = row.iter().map(|&x| f64::from(x) * f64::from(x));
    squares.sum::<f64>().sqrt() as f32
}

/// The rows of one head inside an array of any strides whose rows are contiguous.
#[derive(Debug, Clone, Copy)]
pub struct Strided<'a> {
    pub dim: usize,
    pub len: usize,
    /// Elements from one row to the next, at least `dim` unless there is one row.
    pub stride: usize,
    pub elements: Elements<'a>,
}

impl<'a> Strided<'a> {
    pub fn row(self, i: usize) -> Elements<'a> {
        self.elements
            .slice(i * self.stride..i * self.stride + self.dim)
    }

    /// The first rows.
    pub fn first(self, len: usize) -> Self {
        Self { len, ..self }
    }

    pub fn dtype(self) -> Dtype {
        match self.elements {
            Elements::F32(_) => Dtype::F32,
            Elements::F16(_) => Dtype::F16,
            Elements::Bf16(_) => Dtype::Bf16,
        }
    }

    /// The first element that is NaN or larger than `limit` in size: its row and value.
    pub fn beyond(self, limit: f32) -> Option<(usize, f32)> {
        (0..self.len).find_map(|i| {
            typed!(Elements, self.row(i), x => beyond(x, limit)).map(|value| (i, value))
        })
    }
}

fn beyond<T: Element + Bounded>(row: &[T], limit: f32) -> Option<f32> {
    // One pass without branches, so that it vectorises; the search runs only on bad input.
    if row.iter().fold(true, |ok, &x| ok & x.within(limit)) {
        return None;
    }
    row.iter().find(|x| !x.within(limit)).map(|x| x.exact())
}

/// Size by bits: [`Element::to_f32`] is only defined for finite values.
trait Bounded: Copy {
    /// Not NaN, and at most `limit` (finite, and no less than the largest f16) in size.
    fn within(self, limit: f32) -> bool;
    fn exact(self) -> f32;
}

impl Bounded for f32 {
    #[inline(always)]
    fn within(self, limit: f32) -> bool {
        self.abs() <= limit
    }
    fn exact(self) -> f32 {
        self
    }
}

impl Bounded for f16 {
    #[inline(always)]
    fn within(self, _: f32) -> bool {
        self.to_bits() & 0x7c00 != 0x7c00
    }
    fn exact(self) -> f32 {
        f16::to_f32(self)
    }
}

impl Bounded for bf16 {
    #[inline(always)]
    fn within(self, limit: f32) -> bool {
        f32::from_bits(u32::from(self.to_bits()) << 16).abs() <= limit
    }
    fn exact(self) -> f32 {
        bf16::to_f32(self)
    }
}

/// Owned elements of one type.
#[derive(Debug, Clone)]
pub enum Buffer {
    F32(Numbers<f32>),
    F16(Numbers<f16>),
    Bf16(Numbers<bf16>),
}

impl Buffer {
    pub fn with_capacity(dtype: Dtype, elements: usize) -> Self {
        match dtype {
            Dtype::F32 => Self::F32(Numbers::with_capacity(elements)),
            Dtype::F16 => Self::F16(Numbers::with_capacity(elements)),
            Dtype::Bf16 => Self::Bf16(Numbers::with_capacity(elements)),
        }
    }

    /// All zeros, exactly as long as asked.
    pub fn zeros(dtype: Dtype, elements: usize) -> Self {
        match dtype {
            Dtype::F32 => Self::F32(Numbers::zeros(elements)),
            Dtype::F16 => Self::F16(Numbers::zeros(elements)),
            Dtype::Bf16 => Self::Bf16(Numbers::zeros(elements)),
        }
    }

    pub fn as_elements(&self) -> Elements<'_> {
        match self {
            Self::F32(x) => Elements::F32(x),
            Self::F16(x) => Elements::F16(x),
            Self::Bf16(x) => Elements::Bf16(x),
        }
    }

    /// Overwrites from `at` on. The type must be the buffer's own.
    pub fn write(&mut self, at: usize, row: Elements<'_>) {
        let mut all = match self {
            Self::F32(x) => ElementsMut::F32(x),
            Self::F16(x) => ElementsMut::F16(x),
            Self::Bf16(x) => ElementsMut::Bf16(x),
        };
        all.copy(at, row);
    }

    pub fn copy_within(&mut self, range: std::ops::Range<usize>, to: usize) {
        typed!(Buffer, self, x => x.copy_within(range, to));
    }

    pub fn bytes(&self) -> usize {
        typed!(Buffer, self, x => x.capacity() * element_size(x))
    }
}

/// Room for `more` elements, grown by an eighth at a time: memory counts more here than the copies
/// that doubling saves.
pub fn make_room<T>(vec: &mut Vec<T>, more: usize) {
    if vec.capacity() - vec.len() < more {
        vec.reserve_exact(more.max(vec.len() / 8));
    }
}

/// The same for rows.
fn make_room_for<T: Number>(numbers: &mut Numbers<T>, more: usize) {
    if numbers.capacity() - numbers.len() < more {
        numbers.reserve_exact(more.max(numbers.len() / 8));
    }
}

fn extend_f32<T: Element + Number>(to: &mut Numbers<T>, row: &[f32]) {
    let mut block = [T::from_f32(0.0); 64];
    for row in row.chunks(block.len()) {
        T::round(row, &mut block[..row.len()]);
        to.extend_from_slice(&block[..row.len()]);
    }
}

fn element_size<T>(_: &[T]) -> usize {
    size_of::<T>()
}

/// A sequence of rows of one element type that grows at its end and shrinks at both.
#[derive(Debug, Clone)]
pub struct RowStore {
    dtype: Dtype,
    dim: usize,
    len: usize,
    /// Rows dropped from the front that still lie before the others.
    dropped: usize,
    data: Buffer,
}

impl RowStore {
    pub fn new(dtype: Dtype, dim: usize) -> Self {
        Self::with_capacity(dtype, dim, 0)
    }

    pub fn with_capacity(dtype: Dtype, dim: usize, rows: usize) -> Self {
        Self {
            dtype,
            dim,
            len: 0,
            dropped: 0,
            data: Buffer::with_capacity(dtype, rows * dim),
        }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn dim(&self) -> usize {
        self.dim
    }

    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    pub fn rows(&self) -> Rows<'_> {
        Rows {
            dim: self.dim,
            len: self.len,
            elements: self.elements(),
        }
    }

    fn elements(&self) -> Elements<'_> {
        let first = self.dropped * self.dim;
        let elements = self.data.as_elements();
        elements.slice(first..first + self.len * self.dim)
    }

    pub fn row(&self, i: usize) -> Elements<'_> {
        self.rows().row(i)
    }

    pub fn strided(&self) -> Strided<'_> {
        Strided {
            dim: self.dim,
            len: self.len,
            stride: self.dim,
            elements: self.elements(),
        }
    }

    /// Appends a row of the store's own type, bit for bit.
    pub fn push(&mut self, row: Elements<'_>) {
        typed!(Buffer, &mut self.data, x => make_room_for(x, self.dim));
        match (&mut self.data, row) {
            (Buffer::F32(x), Elements::F32(row)) => x.extend_from_slice(row),
            (Buffer::F16(x), Elements::F16(row)) => x.extend_from_slice(row),
            (Buffer::Bf16(x), Elements::Bf16(row)) => x.extend_from_slice(row),
            _ => panic!("a row of another dtype than its store"),
        }
        self.len += 1;
    }

    /// Appends a row rounded from f32.
    pub fn push_f32(&mut self, row: &[f32]) {
        typed!(Buffer, &mut self.data, x => make_room_for(x, self.dim));
        typed!(Buffer, &mut self.data, x => extend_f32(x, row));
        self.len += 1;
    }

    /// Room for exactly this many more rows.
    pub fn reserve(&mut self, rows: usize) {
        typed!(Buffer, &mut self.data, x => x.reserve_exact(rows * self.dim));
    }

    /// Gives unused capacity back.
    pub fn shrink_to_fit(&mut self) {
        typed!(Buffer, &mut self.data, x => x.shrink_to_fit());
    }

    /// Overwrites a row, rounded from f32.
    pub fn set_f32(&mut self, i: usize, row: &[f32]) {
        let first = (self.dropped + i) * self.dim;
        typed!(Buffer, &mut self.data, x => Element::round(row, &mut x[first..][..row.len()]));
    }

    pub fn swap_remove(&mut self, i: usize) {
        let (dim, last) = (self.dim, self.len - 1);
        let at = |i| (self.dropped + i) * dim;
        self.data.copy_within(at(last)..at(last + 1), at(i));
        self.truncate(last);
    }

    pub fn truncate(&mut self, rows: usize) {
        self.len = self.len.min(rows);
        let elements = (self.dropped + self.len) * self.dim;
        typed!(Buffer, &mut self.data, x => x.truncate(elements));
    }

    /// Removes the first rows and gives back memory that is more than twice what is left. The others
    /// move up only when a quarter as many are gone: a window that slides does not move every time.
    pub fn drop_front(&mut self, rows: usize) {
        self.len -= rows;
        self.dropped += rows;
        let (gone, keep) = (self.dropped * self.dim, self.len * self.dim);
        typed!(Buffer, &mut self.data, x => {
            if x.capacity() > 2 * keep {
                // Not shrunk in place: the rest would pin a hole that the next bulk does not fit.
                *x = Numbers::from(&x[gone..]);
            } else if 4 * gone > keep {
                x.drop_front(gone);
            } else {
                return;
            }
        });
        self.dropped = 0;
    }

    /// Bytes held, unused capacity included.
    pub fn bytes(&self) -> usize {
        self.data.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn f16_conversion_is_exact_for_every_finite_number() {
        for bits in 0..=u16::MAX {
            let x = f16::from_bits(bits);
            if x.is_finite() {
                let ours = Element::to_f32(x);
                assert_eq!(ours.to_bits(), f16::to_f32(x).to_bits(), "{bits:#x}");
            }
            assert_eq!(x.within(f32::MAX), x.is_finite());
            assert_eq!(
                bf16::from_bits(bits).within(f32::MAX),
                bf16::from_bits(bits).is_finite()
            );
        }
    }

    #[test]
    fn rounding_saturates_instead_of_overflowing() {
        assert_eq!(<f16 as Element>::from_f32(1e9), f16::MAX);
        assert_eq!(<f16 as Element>::from_f32(-1e9), f16::MIN);
    }

    proptest! {
        /// Rows come and go at both ends as in a plain deque; a fall of length gives memory back.
        #[test]
        fn a_store_behaves_like_a_deque(
            edits in prop::collection::vec((0usize..5, any::<prop::sample::Index>()), 1..300),
        ) {
            let mut store = RowStore::new(Dtype::F32, 2);
            let mut model: std::collections::VecDeque<f32> = Default::default();
            for (step, (edit, pick)) in edits.into_iter().enumerate() {
                let some = pick.index(model.len() + 1);
                match edit {
                    0 => {
                        store.drop_front(some.min(3));
                        model.drain(..some.min(3));
                        // Dropped rows are at most a quarter of those left.
                        prop_assert!(4 * store.dropped <= store.len());
                        prop_assert!(store.bytes() <= 2 * store.len() * 8);
                    }
                    1 => {
                        store.truncate(some);
                        model.truncate(some);
                    }
                    2 if some < model.len() => {
                        store.swap_remove(some);
                        model.swap_remove_back(some);
                    }
                    3 if some < model.len() => {
                        store.set_f32(some, &[-(step as f32), 0.0]);
                        model[some] = -(step as f32);
                    }
                    _ => {
                        store.push_f32(&[step as f32, 1.0]);
                        model.push_back(step as f32);
                    }
                }
                prop_assert_eq!(store.len(), model.len());
                for (i, &want) in model.iter().enumerate() {
                    let mut row = [0.0; 2];
                    to_f32(store.row(i), &mut row);
                    prop_assert_eq!(row[0], want);
                    to_f32(store.strided().row(i), &mut row);
                    prop_assert_eq!(row[0], want);
                }
            }
        }

        /// Whole rows round as their elements do.
        #[test]
        fn rows_round_like_elements(row in prop::collection::vec(-1e6f32..1e6, 0..200), small in any::<bool>()) {
            let row: Vec<f32> = row.iter().map(|x| if small { x * 1e-12 } else { *x }).collect();
            let mut out = vec![f16::ZERO; row.len()];
            Element::round(&row, &mut out);
            let one = |&x: &f32| <f16 as Element>::from_f32(x);
            prop_assert!(row.iter().map(one).eq(out));
        }
    }

    #[test]
    fn store_edits() {
        let mut store = RowStore::new(Dtype::F32, 2);
        for i in 0..5 {
            store.push_f32(&[i as f32, 10.0 + i as f32]);
        }
        store.swap_remove(1);
        store.drop_front(1);
        let mut out = [0.0; 2];
        to_f32(store.row(0), &mut out);
        assert_eq!((store.len(), out), (3, [4.0, 14.0]));
    }
}
