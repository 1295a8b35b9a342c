//! A vector of numbers that lies in huge pages where it is long and the system has them: rows are read
//! in no order, and in small pages each would need an entry of its own in the tables of addresses
//! (packing is 1.5 times as fast, `cargo bench --bench pack`).

use std::alloc::{Layout, alloc, alloc_zeroed, dealloc, handle_alloc_error, realloc};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Numbers: no destructor, and all bytes zero is one of them.
pub trait Number: Copy + Send + Sync + 'static {}
impl Number for f32 {}
impl Number for half::f16 {}
impl Number for half::bf16 {}

pub struct Numbers<T: Number> {
    /// Of `capacity` elements, the first `len` of them initialised; dangling without capacity.
    start: NonNull<T>,
    len: usize,
    capacity: usize,
}

// SAFETY: it owns its memory alone, and numbers may go anywhere.
unsafe impl<T: Number> Send for Numbers<T> {}
// SAFETY: a shared reference only reads.
unsafe impl<T: Number> Sync for Numbers<T> {}

impl<T: Number> Numbers<T> {
    pub fn with_capacity(capacity: usize) -> Self {
        Self {
            start: allocate(capacity, false),
            len: 0,
            capacity,
        }
    }

    pub fn zeros(len: usize) -> Self {
        Self {
            start: allocate(len, true),
            len,
            capacity: len,
        }
    }

    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Room for exactly so many more, if there is less.
    pub fn reserve_exact(&mut self, more: usize) {
        if self.capacity - self.len < more {
            self.move_to(self.len + more);
        }
    }

    /// Appends without looking for more room than this needs.
    pub fn extend_from_slice(&mut self, numbers: &[T]) {
        self.reserve_exact(numbers.len());
        // SAFETY: there is room for them behind the first `len`; a borrowed slice lies elsewhere.
        unsafe {
            let end = self.start.as_ptr().add(self.len);
            end.copy_from_nonoverlapping(numbers.as_ptr(), numbers.len());
        }
        self.len += numbers.len();
    }

    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Removes the first `count`; the others move up.
    pub fn drop_front(&mut self, count: usize) {
        self.copy_within(count.., 0);
        self.len -= count;
    }

    pub fn shrink_to_fit(&mut self) {
        if self.capacity > self.len {
            self.move_to(self.len);
        }
    }

    /// Changes the capacity, to `len` or more.
    fn move_to(&mut self, capacity: usize) {
        let (old, new) = (layout::<T>(self.capacity), layout::<T>(capacity));
        if [old, new]
            .iter()
            .all(|layout| layout.size() > 0 && !huge::is_long(layout.size()))
        {
            // In place, if the heap can.
            // SAFETY: allocated on the heap with the old layout; the new size is not zero.
            let start = unsafe { realloc(self.start.as_ptr().cast(), old, new.size()) };
            let Some(start) = NonNull::new(start) else {
                handle_alloc_error(new)
            };
            (self.start, self.capacity) = (start.cast(), capacity);
            return;
        }
        let mut moved = Self::with_capacity(capacity);
        // SAFETY: as many elements fit, and new memory does not overlap.
        unsafe {
            let to = moved.start.as_ptr();
            to.copy_from_nonoverlapping(self.start.as_ptr(), self.len);
        }
        moved.len = self.len;
        *self = moved;
    }
}

/// Uninitialised or zeroed memory; dangling for none.
fn allocate<T: Number>(capacity: usize, zeroed: bool) -> NonNull<T> {
    let layout = layout::<T>(capacity);
    if layout.size() == 0 {
        return NonNull::dangling();
    }
    if let Some(start) = huge::allocate(layout) {
        return start.cast();
    }
    // SAFETY: the size is not zero.
    let start = unsafe {
        match zeroed {
            true => alloc_zeroed(layout),
            false => alloc(layout),
        }
    };
    let Some(start) = NonNull::new(start) else {
        handle_alloc_error(layout)
    };
    start.cast()
}

fn layout<T: Number>(capacity: usize) -> Layout {
    Layout::array::<T>(capacity).expect("a capacity that fits into memory")
}

/// Mappings of their own for long allocations: a wish for huge pages that outlived its allocation would
/// make what the heap puts there next larger.
mod huge {
    use std::alloc::Layout;
    #[cfg(target_os = "linux")]
    use std::alloc::handle_alloc_error;
    use std::ptr::NonNull;

    /// Bytes of a huge page, and of the shortest mapping.
    const PAGE: usize = 2 << 20;

    pub fn is_long(bytes: usize) -> bool {
        cfg!(all(target_os = "linux", not(miri))) && bytes >= PAGE
    }

    /// Zeroed memory, aligned to a page of the system. `None` where the heap is to be asked.
    pub fn allocate(layout: Layout) -> Option<NonNull<u8>> {
        let bytes = layout.size();
        if !is_long(bytes) {
            return None;
        }
        #[cfg(target_os = "linux")]
        {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            // SAFETY: a new mapping touches no other memory. The advice is about the mapping alone,
            // and does not change what it holds.
            unsafe {
                let start = libc::mmap(std::ptr::null_mut(), bytes, access, kind, -1, 0);
                if start == libc::MAP_FAILED {
                    handle_alloc_error(layout);
                }
                libc::madvise(start, bytes, libc::MADV_HUGEPAGE);
                NonNull::new(start.cast())
            }
        }
        #[cfg(not(target_os = "linux"))]
        None
    }

    /// Gives back what [`allocate`] gave; `false` if that was nothing.
    ///
    /// # Safety
    /// `start` and `bytes` are those of a call of `allocate`, and the memory is not used any more.
    pub unsafe fn free(start: NonNull<u8>, bytes: usize) -> bool {
        #[cfg(target_os = "linux")]
        if is_long(bytes) {
            // SAFETY: the caller's promise.
            unsafe { libc::munmap(start.as_ptr().cast(), bytes) };
        }
        let _ = start;
        is_long(bytes)
    }
}

impl<T: Number> Deref for Numbers<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the first `len` elements are initialised, and borrowed with `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T: Number> DerefMut for Numbers<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T: Number> Drop for Numbers<T> {
    fn drop(&mut self) {
        let layout = layout::<T>(self.capacity);
        // SAFETY: allocated with this layout, and not used any more.
        unsafe {
            if layout.size() > 0 && !huge::free(self.start.cast(), layout.size()) {
                dealloc(self.start.as_ptr().cast(), layout);
            }
        }
    }
}

impl<T: Number> From<&[T]> for Numbers<T> {
    fn from(slice: &[T]) -> Self {
        let mut numbers = Self::with_capacity(slice.len());
        numbers.extend_from_slice(slice);
        numbers
    }
}

impl<T: Number> Clone for Numbers<T> {
    fn clone(&self) -> Self {
        Self::from(&**self)
    }
}

impl<T: Number + std::fmt::Debug> std::fmt::Debug for Numbers<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        (**self).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;
    use proptest::prelude::*;

    proptest! {
        /// Against a Vec, whatever is done to it.
        #[test]
        fn behaves_like_a_vector(seed in any::<u64>(), steps in 1usize..80) {
            let mut random = Random::new(seed, 0);
            let (mut numbers, mut model) = (Numbers::<f32>::with_capacity(0), Vec::new());
            for step in 0..steps {
                let some = random.below(model.len() + 1);
                match random.below(8) {
                    0 => numbers.reserve_exact(some),
                    1 => (numbers.truncate(some), model.truncate(some)).1,
                    2 => (numbers.drop_front(some), drop(model.drain(..some))).1,
                    3 => numbers.shrink_to_fit(),
                    4 => numbers = numbers.clone(),
                    5 => numbers.iter_mut().chain(&mut model).for_each(|x| *x += 1.0),
                    _ => {
                        let row = vec![step as f32; random.below(300)];
                        numbers.extend_from_slice(&row);
                        model.extend_from_slice(&row);
                    }
                }
                prop_assert_eq!(&*numbers, &*model);
                prop_assert!(numbers.capacity() >= numbers.len());
            }
        }
    }

    #[test]
    fn long_ones_behave_alike() {
        for len in [0, 1, 4096, (2 << 20) - 1, 2 << 20, 5 << 20] {
            let mut zeros = Numbers::<half::f16>::zeros(len);
            assert_eq!((zeros.len(), zeros.capacity()), (len, len));
            assert!(zeros.iter().all(|x| x.to_bits() == 0));
            zeros.extend_from_slice(&[half::f16::ONE; 3]);
            zeros.drop_front(len / 2);
            zeros.shrink_to_fit();
            assert_eq!(zeros.capacity(), len - len / 2 + 3);
            assert_eq!(zeros[len - len / 2..], [half::f16::ONE; 3]);
        }
    }
}
