//! Memory asked for before it is read.

/// Asks for the cache lines of elements that are soon read, as far as the second level: the first
/// has too few slots for what is on its way.
#[inline(always)]
pub fn prefetch<T>(elements: &[T]) {
    // From the start of the first line: rows seldom start where a line does, and end in one more.
    let skew = elements.as_ptr().addr() % 64;
    for line in (0..size_of_val(elements) + skew).step_by(64) {
        let address = elements
            .as_ptr()
            .wrapping_byte_add(line)
            .wrapping_byte_sub(skew);
        // SAFETY: a prefetch reads nothing, wherever it points, and here to a line of the slice.
        #[cfg(target_arch = "x86_64")]
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T1>(address.cast());
        }
        // SAFETY: as above.
        #[cfg(target_arch = "aarch64")]
        unsafe {
            std::arch::asm!("prfm pldl2keep, [{}]", in(reg) address, options(readonly, nostack, preserves_flags));
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let _ = address;
    }
}
