//! The Python module. Only the files of this folder name pyo3 or numpy; each function converts,
//! lets go of the interpreter, calls the core and maps the error.

mod arrays;
mod errors;
mod layer;
mod tree;

use pyo3::prelude::*;

// Every class is frozen around a lock, so free-threaded interpreters may call in at once.
#[pymodule(gil_used = false)]
mod _icecache {
    #[pymodule_export]
    use super::layer::PyChoices;
    #[pymodule_export]
    use super::layer::PyLayer;
    #[pymodule_export]
    use super::tree::PyIndex;
    use pyo3::prelude::*;

    /// Source of the device's kernel, for CuPy to compile.
    #[pymodule_export]
    const SCATTER_ROWS: &str = include_str!("../../../cuda/scatter_rows.cu");

    /// Name of the instruction set that the kernels use on this machine.
    #[pyfunction]
    fn simd_name() -> &'static str {
        crate::simd::name()
    }

    /// Threads of one call when `num_threads` is None.
    #[pyfunction]
    fn available_threads() -> usize {
        crate::threads::available()
    }

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::threads::check_environment()?;
        crate::simd::check_environment()?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
