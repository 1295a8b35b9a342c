//! NumPy arrays as rows, without a copy. bf16 crosses as a uint16 view beside its dtype's name.

use crate::layer::Heads;
use crate::rows::{Dtype, Elements, ElementsMut, Strided};
use half::slice::HalfBitsSliceExt;
use half::{bf16, f16};
use numpy::{
    Element, PyArrayDyn, PyArrayMethods, PyReadonlyArrayDyn, PyReadwriteArrayDyn,
    PyUntypedArrayMethods,
};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

/// A borrowed array of [heads, tokens, head_dim] or [tokens, head_dim].
pub enum Array<'py> {
    F32(PyReadonlyArrayDyn<'py, f32>),
    F16(PyReadonlyArrayDyn<'py, f16>),
    Bf16(PyReadonlyArrayDyn<'py, u16>),
}

impl<'py> Array<'py> {
    /// `dtype`: "f32", "f16" or "bf16" (then the array is the uint16 view).
    pub fn new(array: &Bound<'py, PyAny>, dtype: &str) -> PyResult<Self> {
        Ok(match dtype_named(dtype)? {
            Dtype::F32 => Self::F32(borrow(array)?),
            Dtype::F16 => Self::F16(borrow(array)?),
            Dtype::Bf16 => Self::Bf16(borrow(array)?),
        })
    }

    /// The array as heads; a 2-dimensional one is a single head.
    pub fn heads(&self) -> PyResult<Heads<'_>> {
        match self {
            Self::F32(array) => heads(array, Elements::F32),
            Self::F16(array) => heads(array, Elements::F16),
            Self::Bf16(array) => heads(array, |row| Elements::Bf16(as_bf16(row))),
        }
    }
}

/// A borrowed array to be written, contiguous.
pub enum Output<'py> {
    F32(PyReadwriteArrayDyn<'py, f32>),
    F16(PyReadwriteArrayDyn<'py, f16>),
    Bf16(PyReadwriteArrayDyn<'py, u16>),
}

impl<'py> Output<'py> {
    /// `dtype`: "f32", "f16" or "bf16" (then the array is the uint16 view).
    pub fn new(array: &Bound<'py, PyAny>, dtype: &str) -> PyResult<Self> {
        Ok(match dtype_named(dtype)? {
            Dtype::F32 => Self::F32(borrow_mut(array)?),
            Dtype::F16 => Self::F16(borrow_mut(array)?),
            Dtype::Bf16 => Self::Bf16(borrow_mut(array)?),
        })
    }

    pub fn elements(&mut self) -> PyResult<ElementsMut<'_>> {
        Ok(match self {
            Self::F32(array) => ElementsMut::F32(array.as_slice_mut()?),
            Self::F16(array) => ElementsMut::F16(array.as_slice_mut()?),
            Self::Bf16(array) => ElementsMut::Bf16(array.as_slice_mut()?.reinterpret_cast_mut()),
        })
    }
}

pub fn dtype_named(name: &str) -> PyResult<Dtype> {
    Dtype::from_name(name)
        .ok_or_else(|| PyTypeError::new_err(format!("dtype must be f32, f16 or bf16, got {name}")))
}

fn borrow<'py, T: Element>(array: &Bound<'py, PyAny>) -> PyResult<PyReadonlyArrayDyn<'py, T>> {
    Ok(array.cast::<PyArrayDyn<T>>()?.try_readonly()?)
}

fn borrow_mut<'py, T: Element>(array: &Bound<'py, PyAny>) -> PyResult<PyReadwriteArrayDyn<'py, T>> {
    Ok(array.cast::<PyArrayDyn<T>>()?.try_readwrite()?)
}

fn as_bf16(bits: &[u16]) -> &[bf16] {
    bits.reinterpret_cast()
}

fn heads<'a, T: Element>(
    array: &'a PyReadonlyArrayDyn<'_, T>,
    wrap: impl Fn(&'a [T]) -> Elements<'a>,
) -> PyResult<Heads<'a>> {
    let item = size_of::<T>() as isize;
    let (shape, strides) = (array.shape(), array.strides());
    let (count, head_stride, shape, strides) = match (shape, strides) {
        ([h, n, d], [s, r, c]) => (*h, *s, [*n, *d], [*r, *c]),
        ([n, d], [r, c]) => (1, 0, [*n, *d], [*r, *c]),
        _ => {
            let text = format!("expected 2 or 3 dimensions, got shape {shape:?}");
            return Err(PyValueError::new_err(text));
        }
    };
    let [len, dim] = shape;
    let empty = count * len * dim == 0;
    let start = array.data();
    let fits = |stride: isize, least: isize| stride % item == 0 && stride >= least;
    let rows_fit = dim <= 1 || strides[1] == item;
    let row_stride = if len <= 1 {
        dim as isize * item
    } else {
        strides[0]
    };
    let heads_fit = count <= 1 || fits(head_stride, 0);
    let aligned = start.is_aligned();
    let readable = rows_fit && fits(row_stride, 0) && heads_fit && aligned;
    if !(empty || readable) {
        return Err(PyValueError::new_err(format!(
            "rows must be contiguous and aligned, got strides {:?} bytes",
            array.strides()
        )));
    }
    let stride = row_stride.max(0) as usize / item as usize;
    Ok((0..count)
        .map(|head| {
            let elements: &'a [T] = if empty {
                &[]
            } else {
                let extent = (len - 1) * stride + dim;
                let offset = if count <= 1 {
                    0
                } else {
                    head * (head_stride / item) as usize
                };
                // SAFETY: NumPy guarantees that every element of the array, hence the first and the
                // last of this head, lies in one allocation; strides are checked above to be
                // non-negative multiples of the element size, so the head spans `extent` elements
                // from its first. The borrow keeps the array alive and refuses writes through
                // NumPy's safe interface for 'a.
                unsafe { std::slice::from_raw_parts(start.add(offset), extent) }
            };
            Strided {
                dim,
                len,
                stride,
                elements: wrap(elements),
            }
        })
        .collect())
}
