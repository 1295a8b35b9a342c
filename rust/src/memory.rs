//! Giving memory back to the operating system.

/// Returns what a build has freed: glibc would keep it, about half a layer's rows each time.
pub fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        unsafe extern "C" {
            fn malloc_trim(pad: usize) -> i32;
        }
        // SAFETY: glibc documents malloc_trim as safe to call from any thread at any time.
        unsafe { malloc_trim(0) };
    }
}
